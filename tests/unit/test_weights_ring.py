"""The ring of weights within one process: round trips, verification, torn reads, which slot is reused."""

import asyncio
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.errors import (
    ConfigError,
    DigestMismatchError,
    TornVersionError,
    UnknownVersionError,
    WeightsError,
)
from millrace.core.types import Endpoint, Staged
from millrace.weights import ring
from millrace.weights.manifest import make_manifest
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import RingReader, RingWriter, open_reader, open_writer

SLOT_BYTES = 8192
SHAPES = {
    "embed": ("float32", (16, 8)),
    "norm": ("bfloat16", (8,)),
    "scale": ("float32", ()),
    "none": ("float32", (0, 3)),
}


def tensor(name: str, dtype: str, shape: tuple[int, ...], fill: int) -> NamedBuffer:
    num_bytes = int(np.prod(shape, dtype=int)) * (2 if dtype == "bfloat16" else 4)
    data = np.random.default_rng([fill, len(name)]).integers(0, 256, num_bytes, dtype=np.uint8)
    return NamedBuffer(name, dtype, shape, data)


def model(fill: int) -> list[NamedBuffer]:
    return [tensor(name, dtype, shape, fill) for name, (dtype, shape) in SHAPES.items()]


class Host:
    """A relay with its writer and one reader."""

    def __init__(self, slots: int = 3, slot_bytes: int = SLOT_BYTES) -> None:
        self.relay = RelayWorker("relay", slots)
        self.endpoint: Endpoint = asyncio.run(self.relay.open(slot_bytes))
        self.writer: RingWriter = open_writer(self.endpoint)
        self.reader: RingReader = open_reader(self.endpoint)

    def stage(self, version: int, digest: str) -> Staged:
        return asyncio.run(self.relay.stage(version, digest))

    def publish(self, version: int, tensors: Sequence[NamedBuffer]) -> Staged:
        self.writer.write(version, tensors)
        return self.stage(version, digest_buffers(tensors))

    def close(self) -> None:
        os.close(int(self.endpoint.path.rsplit("/", 1)[1]))


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


def test_a_reader_in_another_process_finds_out_at_its_view_that_the_relay_is_gone(host):
    staged = host.publish(7, model(1))
    there = pickle.loads(pickle.dumps(host.reader))
    with there.view(7) as (digest, pieces):
        assert digest == staged.digest == digest_buffers(pieces)
    gone = pickle.loads(
        pickle.dumps(
            RingReader(host.reader._memory, msgspec.structs.replace(host.endpoint, path="/proc/self/fd/gone"))
        )
    )
    with pytest.raises(UnknownVersionError), gone.view(7):
        pass


def test_what_was_published_is_read_bit_for_bit(host):
    published, standby = model(1), model(2)
    staged = host.publish(7, published)
    digest = host.reader.read(7, standby)
    assert digest == staged.digest == digest_buffers(published) == digest_buffers(standby)
    assert [t.data.tobytes() for t in standby] == [t.data.tobytes() for t in published]


def test_a_version_that_is_written_but_not_staged_is_not_readable(host):
    host.writer.write(1, model(1))
    assert host.reader.versions() == []
    with pytest.raises(UnknownVersionError, match="version 1 is not held"):
        host.reader.read(1, model(1))


def test_a_flipped_bit_in_the_slot_is_found_when_it_is_staged(host):
    host.writer.write(1, model(1))
    host.writer._memory.data[0][5] ^= 0b100
    with pytest.raises(DigestMismatchError, match="version 1 in slot 0 of relay `relay`"):
        host.stage(1, digest_buffers(model(1)))
    assert host.reader.versions() == []


def test_two_swapped_tensors_of_one_shape_are_found_when_they_are_staged(host):
    first, second = tensor("a", "float32", (4,), 1), tensor("b", "float32", (4,), 2)
    host.writer.write(
        1, [NamedBuffer("a", "float32", (4,), second.data), NamedBuffer("b", "float32", (4,), first.data)]
    )
    with pytest.raises(DigestMismatchError):
        host.stage(1, digest_buffers([first, second]))


def test_staging_again_confirms_and_another_digest_is_refused(host):
    first = host.publish(1, model(1))
    assert host.stage(1, first.digest).versions == first.versions == [1]
    with pytest.raises(DigestMismatchError):
        host.stage(1, "0" * 32)


def test_a_version_that_was_never_written_cannot_be_staged(host):
    host.publish(1, model(1))
    with pytest.raises(UnknownVersionError, match=r"version 2 .* \(present: \[1\]\)"):
        host.stage(2, "0" * 32)


def change(into: list[NamedBuffer], index: int, **fields: object) -> list[NamedBuffer]:
    old = {
        "name": into[index].name,
        "dtype": into[index].dtype,
        "shape": into[index].shape,
        "data": into[index].data,
    }
    return [*into[:index], NamedBuffer(**(old | fields)), *into[index + 1 :]]


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda into: into[1:], "`embed` has no place here"),
        (lambda into: [*into, tensor("bias", "float32", (2,), 3)], "`bias` was not published"),
        (lambda into: change(into, 0, name="wte"), "`embed` has no place here; `wte` was not published"),
        (lambda into: change(into, 0, shape=(8, 16)), r"`embed` is published as float32\[16, 8\]"),
        (
            lambda into: change(into, 1, dtype="float16"),
            r"bfloat16\[8\] \(16 bytes\), expected as float16\[8\]",
        ),
        (lambda into: [into[1], into[0], *into[2:]], "tensor 0 is `embed`, expected `norm`"),
    ],
)
def test_a_reader_of_another_model_is_told_every_difference(host, alter, message):
    host.publish(1, model(1))
    with pytest.raises(WeightsError, match=message):
        host.reader.read(1, alter(model(2)))


def test_a_slot_overwritten_while_it_is_copied_is_torn(host, monkeypatch):
    host.publish(1, model(1))

    def overtaken(*_):
        for version in range(2, 5):
            host.publish(version, model(version))

    monkeypatch.setattr(ring, "compare", overtaken)
    with pytest.raises(TornVersionError, match="overwritten while it was being read"):
        host.reader.read(1, model(9))


def test_a_view_is_the_slot_itself_and_says_at_its_end_whether_it_was_overwritten(host):
    host.publish(1, model(1))
    with host.reader.view(1) as (digest, buffers):
        assert digest == digest_buffers(buffers) == digest_buffers(model(1))
        assert not buffers[0].data.flags.writeable
    with pytest.raises(TornVersionError, match="overwritten while it was being read"):
        with host.reader.view(1) as (digest, buffers):
            for version in range(2, 5):
                host.publish(version, model(version))
            assert digest_buffers(buffers) != digest
            raise ValueError("what comes of wrong bytes")
    with pytest.raises(UnknownVersionError, match="version 1 is not held"):
        host.reader.view(1).__enter__()


def test_a_slot_overwritten_while_it_is_staged_is_not_confirmed(host, monkeypatch):
    from millrace.weights import relay

    digest_slot = relay.digest_slot

    def overtaken(*args):
        found = digest_slot(*args)
        host.writer.write(1, model(2))
        return found

    host.writer.write(1, model(1))
    monkeypatch.setattr(relay, "digest_slot", overtaken)
    with pytest.raises(TornVersionError):
        host.stage(1, digest_buffers(model(1)))
    assert host.reader.versions() == []


def test_a_late_confirmation_of_an_overwritten_filling_confirms_nothing(host):
    host.publish(1, model(1))
    memory = host.relay._memory
    confirmed = int(memory.records["staged"][0])
    host.writer.write(1, model(2))
    memory.records["staged"][0] = confirmed
    assert host.reader.versions() == []


def test_a_writer_killed_in_the_middle_leaves_nothing_readable_and_its_slot_is_used_again(host):
    host.publish(1, model(1))
    host.writer.begin(2, make_manifest(model(2)))
    assert host.reader.versions() == [1]
    host.writer = open_writer(host.endpoint)
    host.publish(2, model(2))
    assert host.reader.versions() == [1, 2]


def test_the_newest_staged_version_survives_while_others_are_written():
    host = Host(slots=2)
    host.publish(1, model(1))
    for version in range(2, 6):
        host.writer.write(version, model(version))
        assert host.reader.versions() == [1]
    host.close()


def test_going_back_to_a_checkpoint_drops_the_versions_of_the_undone_steps(host):
    for version in (1, 2, 3):
        host.publish(version, model(version))
    staged = host.publish(2, model(20))
    assert staged.versions == [1, 2]
    standby = model(0)
    host.reader.read(2, standby)
    assert digest_buffers(standby) == digest_buffers(model(20))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 5), st.lists(st.tuples(st.integers(-2, 3), st.booleans()), max_size=12))
def test_held_versions_are_always_the_last_ones_written_there(slots, moves):
    host, newest, contents = Host(slots=slots), 0, {}
    try:
        for delta, staged in moves:
            newest = max(0, newest + delta)
            fill = len(contents) * 100 + newest
            contents = {version: value for version, value in contents.items() if version <= newest}
            contents[newest] = fill
            host.writer.write(newest, model(fill))
            if staged:
                versions = host.stage(newest, digest_buffers(model(fill))).versions
                assert newest in versions and len(versions) <= slots and versions == sorted(set(versions))
            for version in host.reader.versions():
                assert host.reader.read(version, model(0)) == digest_buffers(model(contents[version]))
    finally:
        host.close()


def test_eight_readers_at_once_all_read_the_same():
    host = Host()
    staged = host.publish(1, model(1))

    def pull(_: int) -> str:
        standby, reader = model(2), open_reader(host.endpoint)
        reader.read(1, standby)
        reader.close()
        return digest_buffers(standby)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(pull, range(32))) == {staged.digest}
    host.close()


def test_opening_again_gives_the_same_endpoint_and_another_size_is_refused(host):
    assert asyncio.run(host.relay.open(SLOT_BYTES)) == host.endpoint
    with pytest.raises(WeightsError, match="is open with 8192 bytes per slot, asked for 1"):
        asyncio.run(host.relay.open(1))


def test_a_version_larger_than_a_slot_is_refused_before_anything_is_touched(host):
    host.publish(1, model(1))
    with pytest.raises(WeightsError, match="version 2 has 8196 bytes, a slot has 8192"):
        host.writer.write(2, [tensor("big", "float32", (2049,), 1)])
    assert host.reader.versions() == [1]


def test_a_version_may_fill_its_slot_to_the_last_byte(host):
    full = [tensor("big", "float32", (SLOT_BYTES // 4,), 1)]
    host.publish(1, full)
    assert host.reader.read(1, full) == digest_buffers(full)


def test_a_buffer_that_is_not_bytes_is_refused_by_name(host):
    with pytest.raises(WeightsError, match="`w`: its buffer is float32"):
        host.writer.write(1, [NamedBuffer("w", "float32", (2,), np.zeros(2, np.float32))])


def test_a_closed_reader_holds_nothing_and_closes_twice(host):
    host.publish(1, model(1))
    host.reader.close()
    host.reader.close()
    assert host.reader.versions() == []


def test_a_reader_cannot_write(host):
    with pytest.raises(ValueError, match="read-only"):
        host.reader._memory.data[0][0] = 1


@pytest.mark.parametrize("kind", ["gone", "foreign", "kind"])
def test_an_endpoint_that_is_not_a_ring_is_refused(host, tmp_path, kind):
    foreign = tmp_path / "file"
    foreign.write_bytes(b"x" * 100_000)
    endpoint = {
        "gone": Endpoint("memfd", "/proc/1/fd/987654", 3, SLOT_BYTES),
        "foreign": Endpoint("memfd", str(foreign), 3, SLOT_BYTES),
        "kind": Endpoint("tcp", host.endpoint.path, 3, SLOT_BYTES),
    }[kind]
    message = {"gone": "is the relay alive", "foreign": "not the ring", "kind": "kind 'tcp'"}[kind]
    kind_of_error = WeightsError if kind == "kind" else UnknownVersionError  # of a relay that was restarted
    with pytest.raises(kind_of_error, match=message):
        open_reader(endpoint)


def test_one_slot_is_refused():
    with pytest.raises(ConfigError, match=r"weights.slots` \(1\)"):
        RelayWorker("relay", 1)
