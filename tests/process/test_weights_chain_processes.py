"""Relays as processes: one is killed in the middle of a broadcast, and the chain closes round it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from tests.cables import wire
from tests.relays import RelayProcess

from millrace.core.digest import NamedBuffer
from millrace.weights.ring import open_reader, open_writer

NUM_BYTES, DEADLINE_S = 4_000_000, 120.0


@pytest.fixture
def relays() -> Iterator[list[RelayProcess]]:
    with ExitStack() as stack:
        made = [RelayProcess("127.0.0.1", NUM_BYTES) for _ in range(3)]
        for relay in made:
            stack.callback(relay.kill)
        yield made


def model() -> list[NamedBuffer]:
    random = np.random.default_rng(0)
    size = NUM_BYTES // 8
    return [
        NamedBuffer(f"layers.{i}", "bfloat16", (size // 2,), random.integers(0, 256, size, np.uint8))
        for i in range(8)
    ]


def publish(head: RelayProcess) -> str:
    writer = open_writer(head.endpoint)
    digest = writer.write(1, model())
    writer.close()
    assert head.call("stage", 1, digest).versions == [1]
    return digest


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_a_relay_killed_in_mid_broadcast_leaves_nothing_readable_and_the_next_one_goes_on(
    relays: list[RelayProcess],
) -> None:
    head, victim, last = relays
    digest = publish(head)
    ring = open_reader(victim.endpoint)
    with wire(head.endpoint.address, limit=2_000_000, holds=True) as slow:
        with wire(victim.endpoint.address) as passed_on:
            victim.ask("fetch", 1, digest, [slow.address])
            last.ask("fetch", 1, digest, [passed_on.address, head.endpoint.address])
            until(lambda: passed_on.passed > 1_000_000)
            victim.kill()
            got = last.answer()
    assert ring.versions() == []  # a mapping outlives its relay
    assert (got.versions, got.digest, got.source) == ([1], digest, head.endpoint.address)
    assert got.decoded_bytes == NUM_BYTES  # no chunk that had arrived came a second time
    with open_reader(last.endpoint).view(1) as (_, tensors):
        assert all(
            bytes(ours.data) == bytes(theirs.data) for ours, theirs in zip(tensors, model(), strict=True)
        )
