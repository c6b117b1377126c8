"""Older versions that a relay keeps as deltas: every one that it says it has comes back bit for bit."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import long

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.errors import UnknownVersionError
from millrace.core.types import Staged
from millrace.weights.layout import Memory, take_slot
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer
from millrace.weights.store import directory, history
from millrace.weights.store.directory import chunk_deltas
from millrace.weights.store.history import OlderVersions

NUM = 400_003
SLOT_BYTES = 2 * NUM + 4
WAIT_S = 30.0
SHARES = st.lists(st.sampled_from([0.0, 1e-4, 1e-2, 0.1, 1.0]), min_size=3, max_size=10)
"""Of what changes with each version."""


def tensors(data: np.ndarray) -> list[NamedBuffer]:
    return [
        NamedBuffer("a", "bfloat16", data.shape, data.view(np.uint8)),
        NamedBuffer("b", "float32", (1,), ONE),
    ]


ONE = np.ones(1, np.float32).view(np.uint8)


def first(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 60_000, NUM, dtype=np.uint16)


def changed(data: np.ndarray, share: float, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return data + (random.random(NUM) < share).astype(np.uint16) * random.integers(0, 9, NUM, dtype=np.uint16)


class Host:
    def __init__(self, slots: int, versions: int) -> None:
        self.relay = RelayWorker("relay", slots, versions=versions)
        self.endpoint = asyncio.run(self.relay.open(SLOT_BYTES))
        self.writer, self.reader = open_writer(self.endpoint), open_reader(self.endpoint)

    @property
    def past(self) -> OlderVersions:
        assert self.relay._older is not None
        return self.relay._older

    def publish(self, version: int, data: np.ndarray) -> Staged:
        """And wait until it has led to what it can."""
        digest = self.writer.write(version, tensors(data))
        staged = asyncio.run(self.relay.stage(version, digest))
        deadline_s = time.monotonic() + WAIT_S
        while not self.past.keeping.idle:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return staged

    def read(self, version: int) -> tuple[str, bytes]:
        into = tensors(np.zeros(NUM, np.uint16))
        digest = self.reader.read(version, into)
        assert digest == digest_buffers(into), "what was staged is what is read"
        return digest, into[0].data.tobytes()


@contextmanager
def opened(slots: int = 2, versions: int = 9) -> Iterator[Host]:
    host = Host(slots, versions)
    try:
        yield host
    finally:
        for version in list(host.past._files):
            host.past._close(version)
        os.close(int(host.endpoint.path.rsplit("/", 1)[1]))


@settings(max_examples=6, deadline=None)
@given(slots=st.integers(2, 3), shares=SHARES)
def test_every_version_that_is_held_comes_back_and_the_deltas_stay_within_half_a_slot(slots, shares):
    all_come_back(slots, shares)


@long
@settings(max_examples=60, deadline=None)
@given(slots=st.integers(2, 3), shares=SHARES)
def test_so_it_is_in_more_runs(slots, shares):
    all_come_back(slots, shares)


def all_come_back(slots, shares):
    with opened(slots) as host:
        models = [first()]
        host.publish(0, models[0])
        for version, share in enumerate(shares, 1):
            models.append(changed(models[-1], share, version))
            host.publish(version, models[-1])
            assert host.past.num_bytes <= SLOT_BYTES // 2
            versions = host.reader.versions()
            assert versions == sorted({*host.past.versions(), *host.reader._memory.versions()})
            assert versions == list(range(versions[0], version + 1)), "nothing is missing in between"
            for old in versions:
                assert host.read(old)[1] == models[old].tobytes()


def test_two_slots_hold_as_many_versions_as_are_asked_for_where_little_changes():
    with opened(versions=9) as host:
        data = first()
        for version in range(14):
            staged = host.publish(version, data)
            data = changed(data, 1e-3, version)
        assert host.reader.versions() == list(range(5, 14))
        assert staged.delta_versions == list(range(4, 12)) and staged.versions[-2:] == [12, 13]
        assert host.past.num_bytes <= SLOT_BYTES // 2


def test_a_delta_that_surely_finds_no_room_is_not_made(monkeypatch):
    made = []

    def noted(old, new):
        made.append(old.version)
        return chunk_deltas(old, new)

    monkeypatch.setattr(history, "chunk_deltas", noted)
    monkeypatch.setattr(directory, "SAMPLE_BYTES", 1 << 12)
    with opened() as host:
        models = [first(0), first(1), changed(first(1), 1e-3, 2), changed(first(1), 1e-2, 3)]
        dropped = dict[int, str]()
        for version, data in enumerate(models):
            dropped |= host.publish(version, data).dropped
        assert made == [1, 2]
        assert host.reader.versions() == [1, 2, 3]
        assert host.read(1)[1] == models[1].tobytes()
        reason = (dropped | host.past.take_dropped())[0]
    assert "its delta has about" in reason and f"{SLOT_BYTES // 2:,}" in reason


def test_what_finds_no_room_is_told_with_the_reason():
    with opened() as host:
        host.publish(0, first(0))
        host.publish(1, first(1))
        assert host.reader.versions() == [0, 1]
        staged = host.publish(2, first(2))
        assert host.reader.versions() == [1, 2]
        reasons = {**staged.dropped, **host.past.take_dropped()}
        assert set(reasons) == {0} and "its delta has" in reasons[0]


def test_the_oldest_goes_when_the_room_is_full():
    with opened() as host:
        data, dropped = first(), {}
        for version in range(8):
            dropped |= host.publish(version, data).dropped
            data = changed(data, 0.25, version)
        assert dropped and list(dropped) == list(range(len(dropped))), "one after the other, from the oldest"
        assert "no room" in dropped[0]
        assert host.reader.versions() == list(range(len(dropped | host.past.take_dropped()), 8))


def test_after_a_return_to_a_checkpoint_no_undone_version_is_read():
    with opened() as host:
        models = [first()]
        for version in range(5):
            host.publish(version, models[version])
            models.append(changed(models[version], 1e-3, version))
        again = changed(models[1], 1e-3, 77)
        host.publish(2, again)
        assert host.reader.versions()[-1] == 2 and host.read(2)[1] == again.tobytes()
        for version in set(host.reader.versions()) - {2}:
            assert host.read(version)[1] == models[version].tobytes()


def test_a_reader_of_a_version_that_is_gone_is_told():
    with opened(versions=3) as host:
        data = first()
        for version in range(6):
            host.publish(version, data)
            data = changed(data, 1e-3, version)
        assert host.reader.versions() == [3, 4, 5]
        with pytest.raises(UnknownVersionError, match="version 2 is not held"):
            host.read(2)


def test_a_reader_that_has_begun_reads_on_when_the_relay_drops_the_version():
    with opened() as host:
        data = [first()]
        for version in range(4):
            host.publish(version, data[version])
            data.append(changed(data[version], 1e-3, version))
        with host.reader.view(0) as (digest, pieces):
            host.past._close(0)
            host.publish(4, data[4])
            assert pieces[0].data.tobytes() == data[0].tobytes() and digest_buffers(pieces) == digest


@pytest.mark.parametrize("broken", ["chunk_deltas", "all_slot_weights"])
def test_an_error_of_any_kind_ends_no_more_than_one_delta(monkeypatch, broken):
    with opened() as host:
        data, dropped = [first()], {}
        for version in range(5):
            with monkeypatch.context() as patch:
                if version == 1:
                    patch.setattr(history, broken, no_memory)
                dropped |= host.publish(version, data[version]).dropped
            data.append(changed(data[version], 1e-3, version))
        assert host.reader.versions() == [1, 2, 3, 4]
        assert broken == "all_slot_weights" or "MemoryError" in dropped[0]


def no_memory(*_: object) -> object:
    raise MemoryError


def test_without_a_thread_a_version_is_whole_and_the_next_one_tries_again(monkeypatch):
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened() as host:
        data = [first(), changed(first(), 1e-3, 1)]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            host.past.keeping.ask()
        host.publish(0, data[0])
        host.publish(1, data[1])
        host.publish(2, changed(data[1], 1e-3, 2))
        assert host.reader.versions() == [0, 1, 2]


def test_a_version_that_is_fetched_again_with_other_weights_is_not_told_as_dropped(monkeypatch):
    async def torn(memory: Memory, version: int, *_: object) -> None:
        take_slot(memory, version)
        host.past.keep()
        raise UnknownVersionError("no source has it yet")

    with opened() as host:
        host.publish(0, first())
        host.publish(1, changed(first(), 1e-3, 1))
        monkeypatch.setattr(host.relay, "_fetched", torn)
        for version in (1, 0):
            with pytest.raises(UnknownVersionError):
                asyncio.run(host.relay.fetch(version, "of other weights", []))
            assert host.past.take_dropped() == {}
