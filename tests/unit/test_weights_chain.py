"""Relays that fetch from each other over loopback, in one process: what is forwarded, resumed and refused."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest
from tests.cables import wire

from millrace.core.digest import (
    MULTILINEAR,
    BlockDigest,
    NamedBlock,
    NamedBuffer,
    digest_buffers,
    tensor_digest,
)
from millrace.core.errors import ConfigError, DigestMismatchError, UnknownVersionError, WeightsError
from millrace.core.types import Staged
from millrace.weights.chain import holding
from millrace.weights.chain.holding import ChunkedVersion
from millrace.weights.chain.wire import Link, LinkDeadlines
from millrace.weights.layout import attach
from millrace.weights.manifest import make_manifest
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

SECRET = "of this run"
DEADLINE_S = 30.0
DEADLINES = LinkDeadlines(connect_s=20.0, stall_s=20.0, begin_s=1.0, wait_s=20.0)
STALL_S = 3.0  # a loaded machine is seldom silent for so long
HASTY = LinkDeadlines(connect_s=20.0, stall_s=STALL_S, begin_s=0.1, wait_s=0.5, heartbeat_s=0.05)
PATIENT = msgspec.structs.replace(HASTY, stall_s=20.0)
CHUNK_BYTES = 1000
SHAPES = {"embed": (40, 60), "norm": (7,), "head": (30, 50), "scale": (), "none": (0, 3)}
SLOT_BYTES = 1 << 16
MODEL_BYTES = sum(4 * math.prod(shape) for shape in SHAPES.values())
OVERHEAD_BYTES = 2500


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "CHUNK_STEP_BYTES", CHUNK_BYTES)


def model(seed: int) -> list[NamedBuffer]:
    random = np.random.default_rng(seed)
    return [
        NamedBuffer(name, "float32", shape, random.integers(0, 256, 4 * math.prod(shape), np.uint8))
        for name, shape in SHAPES.items()
    ]


class Host:
    """A relay that listens on loopback, with a reader of its ring."""

    def __init__(self, name: str, *, slots: int = 3, secret: str = SECRET, **options) -> None:
        options = {"deadlines": DEADLINES} | options
        self.relay = RelayWorker(name, slots, address="127.0.0.1", secret=secret, **options)
        self.endpoint = asyncio.run(self.relay.open(SLOT_BYTES))
        self.reader = open_reader(self.endpoint)
        self.writer = open_writer(self.endpoint)

    @property
    def address(self) -> str:
        return self.endpoint.address

    def publish(self, version: int, tensors: Sequence[NamedBuffer]) -> str:
        digest = self.writer.write(version, tensors)
        return asyncio.run(self.relay.stage(version, digest)).digest

    def fetch(self, version: int, digest: str, *sources: str) -> Staged:
        return asyncio.run(self.relay.fetch(version, digest, list(sources)))

    def read(self, version: int) -> list[bytes]:
        with self.reader.view(version) as (_, tensors):
            return [bytes(tensor.data) for tensor in tensors]

    def partial(self, version: int, digest: str) -> ChunkedVersion | None:
        """What has arrived of a version."""
        assert self.relay._network is not None
        return self.relay._network._versions.find(version, digest)

    def close(self) -> None:
        self.relay.close()
        with suppress(OSError):
            os.close(int(self.endpoint.path.rsplit("/", 1)[1]))


@contextmanager
def hosts(*names: str, **options) -> Iterator[list[Host]]:
    made = [Host(name, **options) for name in names]
    try:
        yield made
    finally:
        for host in made:
            host.close()


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def connections(host: Host) -> list[str]:
    """Of those that connect to it, as the kernel lists them."""
    port = int(host.address.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01"]


def test_a_version_goes_down_a_chain_bit_for_bit():
    with hosts("a", "b", "c") as (a, b, c):
        digest = a.publish(7, model(1))
        for host, source in ((b, a), (c, b)):
            staged = host.fetch(7, digest, source.address)
            assert (staged.digest, staged.versions, staged.source) == (digest, [7], source.address)
            assert staged.received_bytes == staged.decoded_bytes == MODEL_BYTES
            assert host.read(7) == [bytes(tensor.data) for tensor in model(1)]


def test_a_relay_forwards_what_it_has_before_it_has_all():
    with hosts("a", "b", "c") as (a, b, c), ThreadPoolExecutor(2) as pool:
        with wire(a.address, limit=9000, holds=True) as slow, wire(b.address) as next_one:
            digest = a.publish(1, model(1))
            fetched = [pool.submit(b.fetch, 1, digest, slow.address)]
            fetched.append(pool.submit(c.fetch, 1, digest, next_one.address))
            until(lambda: next_one.passed > 5000)
            assert b.reader.versions() == c.reader.versions() == []
            slow.free.set()
            assert [future.result(DEADLINE_S).versions for future in fetched] == [[1], [1]]
    assert c.read(1) == [bytes(tensor.data) for tensor in model(1)]


def test_what_arrived_before_a_source_died_is_not_asked_for_again():
    with hosts("a", "b") as (a, b), wire(a.address, limit=9000) as dying, wire(a.address) as other:
        digest = a.publish(1, model(1))
        assert b.fetch(1, digest, dying.address, other.address).versions == [1]
        assert MODEL_BYTES < dying.passed + other.passed < MODEL_BYTES + 2 * OVERHEAD_BYTES
        assert other.passed < MODEL_BYTES - 7000 + OVERHEAD_BYTES


def test_a_later_call_goes_on_where_an_earlier_one_stopped():
    with hosts("a", "b") as (a, b), wire(a.address, limit=9000) as dying, wire(a.address) as other:
        digest = a.publish(1, model(1))
        with pytest.raises(WeightsError, match="has ended the connection"):
            b.fetch(1, digest, dying.address)
        assert b.reader.versions() == []
        assert b.fetch(1, digest, other.address).versions == [1]
        assert other.passed < MODEL_BYTES - 7000 + OVERHEAD_BYTES


def test_a_source_that_falls_silent_is_left_at_its_deadline():
    with hosts("a", "b", deadlines=HASTY) as (a, b), wire(a.address, limit=9000, holds=True) as silent:
        digest = a.publish(1, model(1))
        with pytest.raises(WeightsError, match=rf"{silent.address} sends nothing any more for {STALL_S:g} s"):
            b.fetch(1, digest, silent.address)
        assert b.fetch(1, digest, silent.address, a.address).versions == [1]


def test_a_relay_that_itself_waits_is_not_taken_for_dead_and_not_waited_for_for_ever():
    with hosts("a", "b", "c", deadlines=PATIENT) as (a, _, c), ThreadPoolExecutor(1) as pool:
        patient = Host("patient", deadlines=PATIENT)
        with wire(a.address, limit=9000, holds=True) as silent, closing(patient):
            digest = a.publish(1, model(1))
            stuck = pool.submit(patient.fetch, 1, digest, silent.address)
            until(lambda: patient.partial(1, digest))
            with pytest.raises(WeightsError, match="itself waits, for more than"):
                c.fetch(1, digest, patient.address)
            silent.free.set()
            assert stuck.result(DEADLINE_S).versions == [1]


def test_a_relay_whose_source_waits_for_a_slow_link_waits_as_long_as_bytes_come_there(monkeypatch):
    """The chunk takes twice as long as a relay waits for a chunk of a source that waits itself."""
    monkeypatch.setattr(holding, "CHUNK_STEP_BYTES", 8000)
    deadlines = msgspec.structs.replace(DEADLINES, stall_s=1.0, wait_s=2.0, heartbeat_s=0.05)
    with hosts("a", "b", "c", deadlines=deadlines) as (a, b, c), ThreadPoolExecutor(1) as pool:
        with wire(a.address, limit=MODEL_BYTES - 8000, pause_s=0.25) as slow:
            digest = a.publish(1, model(1))
            fetching = pool.submit(b.fetch, 1, digest, slow.address)
            until(lambda: b.partial(1, digest))
            assert c.fetch(1, digest, b.address).versions == [1]
            assert fetching.result(DEADLINE_S).versions == [1]


def test_relays_that_wait_for_each_other_tell_each_other_of_no_progress():
    with hosts("a", "b") as (a, b):
        manifest = make_manifest(model(1))
        mine, yours = (holding.arriving(attach(h.endpoint, writable=True), 1, manifest) for h in (a, b))
        mine.receives(500)
        assert yours.goes_on_upstream(mine.reached_bytes)
        mine.goes_on_upstream(yours.reached_bytes)
        for _ in range(3):
            assert not yours.goes_on_upstream(mine.reached_bytes)
            assert not mine.goes_on_upstream(yours.reached_bytes)


def test_who_asks_a_relay_that_has_given_up_is_told_so():
    with hosts("a", "b", "c") as (a, b, c), wire(a.address, limit=9000) as dying:
        digest = a.publish(1, model(1))
        with pytest.raises(WeightsError):
            b.fetch(1, digest, dying.address)
        with pytest.raises(UnknownVersionError, match="stopped to arrive here: no source of it is left"):
            c.fetch(1, digest, b.address)
        assert c.fetch(1, digest, b.address, a.address).versions == [1]


def test_a_relay_waits_for_a_version_that_it_is_about_to_get():
    with hosts("a", "b") as (a, b), ThreadPoolExecutor(1) as pool:
        digest = digest_buffers(model(1))
        fetched = pool.submit(b.fetch, 1, digest, a.address)
        until(lambda: len(connections(a)) == 1)
        a.publish(1, model(1))
        assert fetched.result(DEADLINE_S).versions == [1]


def test_a_version_that_no_source_has_is_unknown_and_what_they_have_is_told():
    with hosts("a", "b", deadlines=PATIENT) as (a, b):
        digest = a.publish(1, model(1))
        with pytest.raises(
            UnknownVersionError, match=rf"version 2 \(no such\) is not here \(present: 1 \({digest}"
        ):
            b.fetch(2, "no such", a.address)
        with pytest.raises(UnknownVersionError, match=r"version 1 .* is not here"):
            b.fetch(1, digest_buffers(model(2)), a.address)


def test_a_slot_that_is_overwritten_while_it_is_sent_is_torn_for_who_receives_it(monkeypatch):
    with hosts("a", "b") as (a, b):
        digest, honest, sent = a.publish(1, model(1)), Link.send_bytes, []

        async def send_bytes(self: Link, data: memoryview) -> None:
            await honest(self, data)
            sent.append(len(data))
            if len(data) == CHUNK_BYTES and sent.count(CHUNK_BYTES) == 2:
                a.writer.write(0, model(9))  # the trainer has gone back: version 1 is no more

        monkeypatch.setattr(Link, "send_bytes", send_bytes)
        with pytest.raises(UnknownVersionError, match=r"has overwritten version 1"):
            b.fetch(1, digest, a.address)
        assert b.reader.versions() == [] and b.partial(1, digest).here.sum() == 1


def test_a_second_order_for_a_version_takes_over_from_the_first():
    with hosts("a", "b") as (a, b), ThreadPoolExecutor(1) as pool:
        with wire(a.address, limit=9000, holds=True) as slow, wire(a.address) as other:
            digest = a.publish(1, model(1))
            first = pool.submit(b.fetch, 1, digest, slow.address)
            until(lambda: (part := b.partial(1, digest)) and part.here.sum() > 5)
            assert b.fetch(1, digest, other.address).versions == [1]
            with pytest.raises(WeightsError, match="another order took over"):
                first.result(DEADLINE_S)
        assert other.passed < MODEL_BYTES - 5000 + OVERHEAD_BYTES


def test_a_version_that_is_published_anew_with_other_weights_is_fetched_anew():
    with hosts("a", "b") as (a, b):
        for version in (1, 2, 3):
            b.fetch(version, a.publish(version, model(version)), a.address)
        again = a.publish(2, model(9))
        assert b.fetch(2, again, a.address).versions == [1, 2, 3]
        assert b.read(2) == [bytes(tensor.data) for tensor in model(9)]


def test_an_older_version_is_fetched_beside_the_newest():
    with hosts("a", "b") as (a, b):
        older, newest = (a.publish(version, model(version)) for version in (1, 2))
        b.fetch(2, newest, a.address)
        assert b.fetch(1, older, a.address).versions == [1, 2]


def test_a_change_in_the_memory_of_a_source_is_found_by_the_digest_of_the_piece():
    with hosts("a", "b") as (a, b):
        digest = a.publish(1, model(1))
        a.writer._memory.data[0][100] ^= 1
        with pytest.raises(DigestMismatchError, match=r"`embed` of version 1 has digest .* the trainer's"):
            b.fetch(1, digest, a.address)
        assert b.reader.versions() == []


def test_the_secret_of_another_run_is_refused_in_words_and_nothing_is_sent():
    with hosts("a") as (a,), hosts("b", secret="of another run") as (b,), wire(a.address) as cable:
        digest = a.publish(1, model(1))
        with pytest.raises(WeightsError, match=r"at 127.* refuses this one: their secrets or"):
            b.fetch(1, digest, cable.address)
        assert cable.passed < 100 and b.reader.versions() == []


def test_a_relay_with_an_address_needs_a_secret():
    with pytest.raises(ConfigError, match="needs the secret"):
        RelayWorker("relay", 2, address="127.0.0.1")


def test_a_version_that_is_readable_is_not_asked_for_again():
    with hosts("a", "b") as (a, b):
        digest = a.publish(1, model(1))
        b.fetch(1, digest, a.address)
        assert b.fetch(1, digest) == Staged(1, digest, [1], ANY)


def test_the_digest_of_the_version_is_that_of_its_buffers():
    with hosts("a", "b") as (a, b):
        digest = a.publish(1, model(1))
        assert b.fetch(1, digest, a.address).digest == digest_buffers(model(1))


def test_a_corrupted_chunk_is_refused_and_named():
    with hosts("a", "b") as (a, b), wire(a.address, flip=3100) as cable:
        digest = a.publish(1, model(1))
        with pytest.raises(DigestMismatchError, match=r"chunk \d of `embed` of version 1 was changed"):
            b.fetch(1, digest, cable.address)
        assert b.reader.versions() == []
        assert b.fetch(1, digest, a.address).versions == [1]


def test_no_source_answers_and_each_is_named():
    with hosts("a", "b") as (a, b):
        digest = a.publish(1, model(1))
        a.relay.close()
        with pytest.raises(WeightsError, match=rf"{a.address} cannot be reached.*{b.address}") as caught:
            b.fetch(1, digest, a.address, b.address)
        assert isinstance(caught.value, UnknownVersionError)  # b itself answered, and has it not
        with pytest.raises(WeightsError, match="No source answers") as caught:
            b.fetch(1, digest, a.address)
        assert not isinstance(caught.value, UnknownVersionError)


def test_a_version_that_was_digested_on_a_gpu_is_checked_by_the_same_hash_on_every_host():
    """In pieces, one tensor without any: what replicas of both hosts are told to have is the same."""
    tensors, pieces = model(1), list[NamedBlock]()
    blocks = list[NamedBuffer]()
    for tensor in tensors:
        rows = np.split(tensor.data, 2) if len(tensor.shape) == 2 else [tensor.data]
        for index, data in enumerate(rows if math.prod(tensor.shape) else ()):
            shape = (tensor.shape[0] // len(rows), *tensor.shape[1:]) if tensor.shape else ()
            start = (index * shape[0], *[0] * len(shape[1:])) if shape else ()
            blocks.append(NamedBuffer(tensor.name, "float32", shape, data, start))
            pieces.append((tensor.name, BlockDigest(start, shape, tensor_digest(data, MULTILINEAR))))
    with hosts("a", "b") as (a, b):
        manifest = make_manifest(tensors)
        filling = a.writer.begin(1, manifest)
        for place, block in zip(a.writer.places(filling, manifest, blocks), blocks, strict=True):
            np.copyto(place, block.data.reshape(place.shape))
        published = a.writer.end(filling, manifest, pieces)
        staged = asyncio.run(a.relay.stage(1, published)).digest
        assert staged == digest_buffers(tensors, MULTILINEAR) != published
        assert b.fetch(1, published, a.address).digest == staged
        assert b.read(1) == a.read(1)
