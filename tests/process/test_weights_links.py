"""What every transport between relays keeps, with processes: all bytes, all proofs, no wait for the dead.

`nixl` is tested where it is installed (extra `millrace[nixl]`), over this host's memory: `make test-ray`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec

import numpy as np
import pytest
from tests.cables import wire
from tests.relays import RelayProcess
from tests.runs import events, train

from millrace.core.digest import NamedBuffer
from millrace.core.errors import DigestMismatchError, UnknownVersionError, WeightsError
from millrace.weights.layout import attach
from millrace.weights.ring import open_reader, open_writer

NUM_BYTES, DEADLINE_S = 4_000_000, 120.0
LINK_BYTES_MAX = {"tcp": 2_000_000, "nixl": 3000}  # of a link, so that it has carried some chunks and not all
ENCODINGS = {"tcp": "raw", "nixl": "nixl"}

without_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed (millrace[nixl])")


@pytest.fixture(scope="module", params=["tcp", pytest.param("nixl", marks=without_nixl)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def relays(transport: str) -> Iterator[list[RelayProcess]]:
    """Three that live. Each test has a version of its own."""
    with started(transport, 3) as made:
        yield made


class started:
    """So many relays, until the end of the block."""

    def __init__(self, transport: str, count: int) -> None:
        self._transport, self._count, self._stack = transport, count, ExitStack()

    def __enter__(self) -> list[RelayProcess]:
        made = list[RelayProcess]()
        for _ in range(self._count):
            made.append(RelayProcess("127.0.0.1", NUM_BYTES, transport=self._transport))
            self._stack.callback(made[-1].kill)
        return made

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def model(seed: int) -> list[NamedBuffer]:
    random = np.random.default_rng(seed)
    size = NUM_BYTES // 8
    return [
        NamedBuffer(f"layers.{i}", "bfloat16", (size // 2,), random.integers(0, 256, size, np.uint8))
        for i in range(8)
    ]


def publish(head: RelayProcess, version: int) -> str:
    with closing(open_writer(head.endpoint)) as writer:
        digest = writer.write(version, model(version))
    assert version in head.call("stage", version, digest).versions
    return digest


def has(relay: RelayProcess, version: int) -> bool:
    with closing(open_reader(relay.endpoint)) as reader, reader.view(version) as (_, tensors):
        both = zip(tensors, model(version), strict=True)
        return all(bytes(ours.data) == bytes(theirs.data) for ours, theirs in both)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_a_version_goes_down_a_chain_of_processes_bit_for_bit(relays, transport):
    head, middle, last = relays
    digest = publish(head, 1)
    middle.ask("fetch", 1, digest, [head.endpoint.address])
    last.ask("fetch", 1, digest, [middle.endpoint.address])
    for relay in (middle, last):
        got = relay.answer()
        assert got.digest == digest and got.encodings.keys() == {ENCODINGS[transport]}
        assert got.received_bytes == NUM_BYTES and has(relay, 1)


def test_bytes_that_are_not_what_was_published_are_never_readable(relays):
    head, middle, _ = relays
    digest = publish(head, 4)
    memory = attach(head.endpoint, writable=True)
    slot = next(slot for slot in range(memory.slots) if memory.version(slot) == 4)
    memory.data[slot][NUM_BYTES // 2] ^= 1
    with pytest.raises(DigestMismatchError, match=r"`layers.4` of version 4 has digest"):
        middle.call("fetch", 4, digest, [head.endpoint.address])
    with pytest.raises(UnknownVersionError), closing(open_reader(middle.endpoint)) as reader:
        with reader.view(4):
            pass


def test_a_relay_killed_in_mid_broadcast_leaves_nothing_readable_and_the_next_one_goes_on(relays, transport):
    head, _, last = relays
    digest = publish(head, 5)
    with started(transport, 1) as (victim,), closing(open_reader(victim.endpoint)) as ring:
        with wire(head.endpoint.address, limit=LINK_BYTES_MAX[transport], holds=True) as slow:
            with wire(victim.endpoint.address) as passed_on:
                victim.ask("fetch", 5, digest, [slow.address])
                last.ask("fetch", 5, digest, [passed_on.address, head.endpoint.address])
                until(lambda: passed_on.passed > LINK_BYTES_MAX[transport] // 2)
                victim.kill()
                got = last.answer()
        assert ring.versions() == []  # a mapping outlives its relay
    assert got.source == head.endpoint.address and has(last, 5)
    assert got.decoded_bytes == NUM_BYTES  # no chunk that had arrived came a second time


def test_a_source_killed_while_it_gives_is_left_for_the_next_one(relays, transport):
    head, _, last = relays
    digest = publish(head, 6)
    with started(transport, 1) as (victim,):
        victim.call("fetch", 6, digest, [head.endpoint.address])
        with wire(victim.endpoint.address) as cable:
            last.ask("fetch", 6, digest, [cable.address, head.endpoint.address])
            until(lambda: cable.passed > LINK_BYTES_MAX[transport] // 2)
            victim.kill()
            assert 6 in last.answer().versions and has(last, 6)


def test_a_source_that_stops_without_a_word_is_left_at_a_deadline(relays, transport):
    head, _, last = relays
    digest = publish(head, 20)
    with started(transport, 1) as (victim,):
        with wire(head.endpoint.address, limit=LINK_BYTES_MAX[transport], holds=True) as slow:
            with wire(victim.endpoint.address) as passed_on:
                victim.ask("fetch", 20, digest, [slow.address])
                last.ask("fetch", 20, digest, [passed_on.address])
                until(lambda: passed_on.passed > LINK_BYTES_MAX[transport] // 2)
                os.kill(victim.process.pid, signal.SIGSTOP)
                with pytest.raises(WeightsError, match=r"nothing any more for 4 s|not ended within 4 s"):
                    last.answer()
    assert last.call("fetch", 20, digest, [head.endpoint.address]).versions[-1] == 20 and has(last, 20)


@without_nixl
def test_a_run_on_two_hosts_goes_through_nixl_and_counts_it(start, warm, tmp_path):
    settings = ("steps=2", "runtime.hosts=2", "weights.transport=nixl")
    fetched = events(train(start, tmp_path / "run", *settings), "fetched")
    assert fetched and fetched[0].fields["encodings"].keys() == {"nixl"}
