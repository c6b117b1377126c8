"""A directory or bucket of versions: any reader finds its way, whatever is missing or damaged."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.long import covering

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.errors import ConfigError, UnknownVersionError, WeightsError
from millrace.core.types import Stored
from millrace.weights import relay
from millrace.weights.layout import Memory, attach
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer
from millrace.weights.store.directory import Directory
from millrace.weights.store.restore_paths import RestorePath, StoredVersion, shortest_path, unneeded
from millrace.weights.store.restoring import all_slot_weights, restore

SIZES = {"embed": ("bfloat16", 700_001), "norm": ("float32", 33), "head": ("bfloat16", 400_000)}
SLOT_BYTES = 2_300_000


def first_version() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.integers(0, 60_000, size, dtype=np.uint16 if dtype == "bfloat16" else np.uint32)
        for name, (dtype, size) in SIZES.items()
    }


def stepped(tensors: dict[str, np.ndarray], version: int, share: float = 0.01) -> dict[str, np.ndarray]:
    random = np.random.default_rng(version)
    return {
        name: data + (random.random(data.size) < share).astype(data.dtype) for name, data in tensors.items()
    }


def buffers(tensors: dict[str, np.ndarray]) -> list[NamedBuffer]:
    return [NamedBuffer(n, SIZES[n][0], data.shape, data.view(np.uint8)) for n, data in tensors.items()]


VERSIONS = [first_version()]
for number in range(1, 10):
    VERSIONS.append(stepped(VERSIONS[-1], number))
DIGESTS = [digest_buffers(buffers(tensors)) for tensors in VERSIONS]


class Host:
    def __init__(self, slots: int = 3, **options: str) -> None:
        self.relay = RelayWorker("relay", slots, **options)
        self.endpoint = asyncio.run(self.relay.open(SLOT_BYTES))
        self.memory: Memory = attach(self.endpoint, writable=True)
        self.writer, self.reader = open_writer(self.endpoint), open_reader(self.endpoint)

    def publish(self, version: int) -> None:
        self.writer.write(version, buffers(VERSIONS[version]))
        asyncio.run(self.relay.stage(version, DIGESTS[version]))

    def store(self, directory: Directory, version: int, **options: int) -> dict[str, int]:
        found = {whole.version: whole for whole in all_slot_weights(self.memory)}
        whole = found.pop(version)
        return directory.write(whole, found.values(), **{"anchor_every": 4, "keep": 3} | options)

    def holds_exactly(self, version: int) -> bool:
        into = buffers({name: np.zeros_like(data) for name, data in VERSIONS[0].items()})
        digest = self.reader.read(version, into)
        return digest == DIGESTS[version] == digest_buffers(into)


@pytest.fixture(params=["memory", "file"])
def directory(request, tmp_path) -> Directory:
    url = f"memory://{uuid.uuid4()}/run" if request.param == "memory" else f"file://{tmp_path}/run"
    return Directory(url)


def filled(directory: Directory, newest: int, **options: int) -> Host:
    """A writer that has stored all versions up to `newest`."""
    host = Host()
    for version in range(newest + 1):
        host.publish(version)
        host.store(directory, version, **options)
    return host


def names(directory: Directory) -> list[str]:
    files, root = fsspec.core.url_to_fs(directory.url)
    return sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False))


def damage(directory: Directory, name: str, how: Callable[[bytes], bytes | None]) -> None:
    files, root = fsspec.core.url_to_fs(directory.url)
    changed = how(files.cat_file(f"{root}/{name}"))
    if changed is None:
        files.rm_file(f"{root}/{name}")
    else:
        files.pipe_file(f"{root}/{name}", changed)


def flipped(data: bytes) -> bytes:
    at = len(data) * 2 // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_cold_host_gets_the_newest_version_from_anchor_and_chain(directory):
    filled(directory, 6)
    cold = Host()
    restore(directory, cold.memory, 6, DIGESTS[6])
    assert cold.holds_exactly(6)


def test_a_host_with_a_version_reads_only_deltas(directory):
    filled(directory, 6)
    follower = Host()
    whole = restore(directory, follower.memory, 5, DIGESTS[5])
    delta = restore(directory, follower.memory, 6, DIGESTS[6])
    assert follower.holds_exactly(6) and follower.holds_exactly(5)
    assert delta * 20 < whole
    assert restore(directory, follower.memory, 6, DIGESTS[6]) == 0


def test_an_anchor_is_a_safetensors_file_of_the_version(tmp_path):
    directory = Directory(f"file://{tmp_path}")
    filled(directory, 0)
    anchor = load_file(tmp_path / "v00000000.safetensors")
    assert anchor.keys() == SIZES.keys() and anchor["embed"].dtype == torch.bfloat16
    assert np.array_equal(anchor["embed"].view(torch.uint16).numpy(), VERSIONS[0]["embed"])
    assert np.array_equal(anchor["norm"].view(torch.uint32).numpy(), VERSIONS[0]["norm"])


def test_every_anchor_ends_a_chain_and_old_chains_are_removed(directory):
    filled(directory, 9, anchor_every=3, keep=2)
    assert {v: entry.anchor for v, entry in directory.entries().items()} == {
        6: True,
        7: False,
        8: False,
        9: True,
    }
    assert names(directory) == sorted(
        [f"v{v:08}.json" for v in (6, 7, 8, 9)]
        + [f"v{v:08}.delta" for v in (6, 7, 8, 9)]
        + [f"v{v:08}.safetensors" for v in (6, 9)]
    )
    assert all(restore(directory, Host().memory, v, DIGESTS[v]) for v in (6, 7, 8, 9))


@pytest.mark.parametrize(
    ("how", "name"),
    covering(
        [flipped, lambda data: data[: len(data) // 2], lambda data: None],
        ["v00000003.delta", "v00000002.delta", "v00000003.json", "v00000002.json"],
    ),
)
def test_a_broken_link_is_passed_by_way_of_the_anchor(directory, how, name):
    filled(directory, 6, anchor_every=4, keep=9)
    follower = Host()
    restore(directory, follower.memory, 1, DIGESTS[1])
    damage(directory, name, how)
    restore(directory, follower.memory, 5, DIGESTS[5])  # the anchor is version 4
    assert follower.holds_exactly(5)


@pytest.mark.parametrize("how", [flipped, lambda data: data[:-1], lambda data: None])
def test_a_broken_anchor_is_passed_by_way_of_the_chain_before_it(directory, how):
    filled(directory, 6, anchor_every=4, keep=9)
    damage(directory, "v00000004.safetensors", how)
    for version in (4, 5):
        cold = Host()
        restore(directory, cold.memory, version, DIGESTS[version])
        assert cold.holds_exactly(version)


def test_what_nothing_leads_to_is_unknown_and_every_break_is_named(directory):
    host = filled(directory, 2)
    damage(directory, "v00000000.safetensors", flipped)
    with pytest.raises(UnknownVersionError, match="the anchor of version 0"):
        restore(directory, Host().memory, 2, DIGESTS[2])
    with pytest.raises(UnknownVersionError, match=r"has \[0, 1, 2\]"):
        restore(directory, Host().memory, 7, DIGESTS[7])
    with pytest.raises(UnknownVersionError):
        restore(directory, Host().memory, 2, DIGESTS[3])
    assert host.holds_exactly(2)


def test_a_slot_that_is_restored_is_unreadable_until_every_digest_is_right(directory):
    filled(directory, 1)
    damage(directory, "v00000001.delta", flipped)
    cold = Host()
    with pytest.raises(UnknownVersionError):
        restore(directory, cold.memory, 1, DIGESTS[1])
    assert cold.reader.versions() == []


def test_a_version_is_written_once_and_again_with_other_weights(directory):
    host = filled(directory, 3)
    assert host.store(directory, 3) == {}
    host.writer.write(2, buffers(VERSIONS[7]))
    asyncio.run(host.relay.stage(2, DIGESTS[7]))
    assert host.store(directory, 2)["delta_bytes"] > 0
    assert list(directory.entries()) == [0, 1, 2]  # the steps after 2 were undone
    cold = Host()
    restore(directory, cold.memory, 2, DIGESTS[7])
    assert cold.reader.versions() == [2]


def test_a_writer_whose_bases_are_gone_writes_an_anchor(directory):
    filled(directory, 2)
    new = Host()
    new.publish(5)
    assert new.store(directory, 5).keys() == {"anchor_bytes"}
    restore(directory, Host().memory, 5, DIGESTS[5])


def test_a_directory_that_cannot_be_used_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="nosuch://place"):
        Directory("nosuch://place")
    (tmp_path / "run").write_text("a file")
    host = Host()
    host.publish(0)
    with pytest.raises(WeightsError, match="write version 0"):
        host.store(Directory(f"file://{tmp_path}/run"), 0)


def entry(version: int, *, anchor: bool = False, base: int = -1, size: int = 10) -> StoredVersion:
    return StoredVersion(
        version, f"d{version}", 100, b"", anchor, base, f"d{base}", [size] if base >= 0 else []
    )


ENTRIES = {
    1: entry(1, anchor=True),
    2: entry(2, base=1),
    3: entry(3, base=2),
    4: entry(4, anchor=True, base=3),
    6: entry(6, base=4),
}


@pytest.mark.parametrize(
    ("present", "broken", "path"),
    [
        ({}, (), RestorePath(4, True, (6,), 110)),
        ({4: "d4"}, (), RestorePath(4, False, (6,), 10)),
        ({6: "d6"}, (), RestorePath(6, False, (), 0)),
        ({2: "d2"}, (), RestorePath(2, False, (3, 4, 6), 30)),
        ({2: "other"}, (), RestorePath(4, True, (6,), 110)),
        ({}, {(4, "anchor")}, RestorePath(1, True, (2, 3, 4, 6), 140)),
        ({2: "d2"}, {(3, "delta")}, RestorePath(4, True, (6,), 110)),
        ({}, {(6, "delta")}, None),
    ],
)
def test_the_shortest_way_begins_at_what_is_held_or_at_an_anchor(present, broken, path):
    assert shortest_path(ENTRIES, 6, "d6", present, broken) == path


def test_what_the_kept_versions_are_reached_from_stays():
    assert unneeded(ENTRIES, 1) == [1, 2, 3]
    assert unneeded(ENTRIES, 2) == [1, 2, 3]
    assert unneeded(ENTRIES, 3) == []
    assert unneeded({}, 3) == []


def asked(relay: RelayWorker, version: int) -> Stored:
    """What the relay says once it has stored the version."""
    deadline_s = time.monotonic() + 30
    while (last := asyncio.run(relay.store(version, DIGESTS[version]))).version != version:
        assert time.monotonic() < deadline_s, last
        time.sleep(0.01)
    return last


def test_a_relay_stores_what_it_has_and_another_fetches_it_from_there(tmp_path):
    url = f"file://{tmp_path}/run"
    writer, cold = Host(directory=url), Host()
    for version in (0, 1):
        writer.publish(version)
        stored = asked(writer.relay, version)
        assert not stored.reason and stored.weights_bytes == sum(len(b.data) for b in buffers(VERSIONS[0]))
        got = asyncio.run(cold.relay.fetch(version, DIGESTS[version], [url]))
        assert (got.digest, got.source) == (DIGESTS[version], url)
        assert cold.holds_exactly(version)
    assert got.received_bytes * 20 < stored.weights_bytes, "only what changed was read"


def test_a_version_that_cannot_be_stored_is_told_with_its_reason(tmp_path):
    (tmp_path / "run").write_text("a file")
    host = Host(directory=f"file://{tmp_path}/run")
    host.publish(0)
    assert "write version 0" in asked(host.relay, 0).reason
    assert "in no slot" in asked(host.relay, 3).reason
    with pytest.raises(WeightsError, match="no directory"):
        asyncio.run(Host().relay.store(0, DIGESTS[0]))


def test_an_error_of_any_kind_is_told_and_the_next_version_is_stored(tmp_path, monkeypatch):
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    host = Host(directory=f"file://{tmp_path}/run")
    host.publish(0)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "write", no_memory)
        assert asked(host.relay, 0).reason == "MemoryError: no room"
    host.publish(1)
    assert not asked(host.relay, 1).reason


def test_a_directory_is_read_when_no_relay_answers(directory):
    filled(directory, 2)
    cold = RelayWorker("cold", 3, address="127.0.0.1", secret="of the run")
    asyncio.run(cold.open(SLOT_BYTES))
    try:
        got = asyncio.run(cold.fetch(2, DIGESTS[2], ["127.0.0.1:9", directory.url]))
        assert (got.digest, got.versions, got.source) == (DIGESTS[2], [2], directory.url)
        with pytest.raises(UnknownVersionError, match=r"127\.0\.0\.1:9.*cannot be had from"):
            asyncio.run(cold.fetch(5, DIGESTS[5], ["127.0.0.1:9", directory.url]))
    finally:
        cold.close()


def test_a_cancelled_restore_has_ended_before_the_next_fetch_takes_a_slot(directory, monkeypatch):
    filled(directory, 2)
    cold, writes, began, go_on = Host(), [], threading.Event(), threading.Event()

    def slow(*given: object) -> int:
        writes.append("begins")
        began.set()
        go_on.wait(30)
        num_bytes = restore(*given)
        writes.append("ends")
        return num_bytes

    async def cancelled_and_again() -> None:
        first = asyncio.ensure_future(cold.relay.fetch(1, DIGESTS[1], [directory.url]))
        await asyncio.to_thread(began.wait, 30)
        first.cancel()
        second = asyncio.ensure_future(cold.relay.fetch(2, DIGESTS[2], [directory.url]))
        for _ in range(20):
            await asyncio.sleep(0.005)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert writes == ["begins", "ends", "begins", "ends"] and cold.holds_exactly(2)

    monkeypatch.setattr(relay, "restore", slow)
    asyncio.run(cancelled_and_again())
