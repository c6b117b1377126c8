"""What may befall calls and workers that are cut off, and what never does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import millrace_sim
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded, WorkerDied
from millrace_sim.virtual.faults import ClockJump, Fate, Mishaps, Partitions
from millrace_sim.virtual.seeded import stream
from millrace_sim.virtual.sim_runtime import SimRuntime

PROBE = "millrace.runtime.probe:Probe"
STILL = millrace_sim.Latency(base_s=0.001, jitter_s=0.0)
CUT = millrace_sim.Faults(partitions=(Partitions("w", mtbf_s=0.001, lasts_s=(10.0, 10.0)),))


def under(
    faults: millrace_sim.Faults, scenario: Callable[[SimRuntime], Awaitable[Any]], *, seed: int = 0
) -> Any:
    async def main() -> Any:
        runtime = SimRuntime(seed, faults=faults, latency=STILL)
        try:
            return await scenario(runtime)
        finally:
            await runtime.close()

    return millrace_sim.run(main(), seed=seed, time_max_s=1e6)


async def heard(runtime: SimRuntime, feed: Callable[[Any], Awaitable[None]]) -> list[int]:
    """What reaches a probe that `feed` feeds. It tells by a stream, of which nothing is ever lost."""
    worker, items = await runtime.spawn("w", PROBE), []

    async def listen() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(100.0):
                async for item in worker.stream("listen"):
                    items.append(item)  # noqa: PERF401 - what came before the time is up counts

    async with asyncio.TaskGroup() as group:
        group.create_task(listen())
        await asyncio.sleep(1.0)
        await feed(worker)
    return items


@pytest.mark.parametrize(("fate", "executions"), [("lost", 0), ("unanswered", 1)])
def test_a_call_without_an_answer_is_late_whether_it_was_executed_or_not(fate: str, executions: int) -> None:
    async def feed(worker: Any) -> None:
        with pytest.raises(DeadlineExceeded):
            await worker.call("feed", [1], timeout_s=2.0)

    faults = millrace_sim.Faults(mishaps=(Mishaps("w", **{fate: 1.0}),))
    assert len(under(faults, lambda runtime: heard(runtime, feed))) == executions


def test_a_doubled_call_is_executed_twice_and_answered_once() -> None:
    async def feed(worker: Any) -> None:
        assert await worker.call("feed", [1], timeout_s=2.0) == 1

    faults = millrace_sim.Faults(mishaps=(Mishaps("w", doubled=1.0),))
    assert under(faults, lambda runtime: heard(runtime, feed)) == [1, 1]


async def feed_twenty(worker: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for i in range(20):
            group.create_task(worker.call("feed", [i], timeout_s=50.0))


def test_overtaken_calls_arrive_in_another_order_and_all_of_them() -> None:
    faults = millrace_sim.Faults(mishaps=(Mishaps("w", overtaken=1.0),))
    order = under(faults, lambda runtime: heard(runtime, feed_twenty))
    assert sorted(order) == list(range(20)) != order


def test_a_cut_holds_messages_back_and_neither_loses_nor_swaps_any() -> None:
    assert under(CUT, lambda runtime: heard(runtime, feed_twenty)) == list(range(20))


def test_fates_have_the_probabilities_that_were_asked_for() -> None:
    rng = stream(0, "fates")
    mishaps = Mishaps("*", lost=0.1, unanswered=0.2, doubled=0.3, overtaken=0.2)
    drawn = [mishaps.draw(rng) for _ in range(5000)]
    for fate, share in zip(Fate, (0.2, 0.1, 0.2, 0.3, 0.2), strict=True):
        assert abs(drawn.count(fate) / 5000 - share) < 0.03, fate


def test_a_kill_does_not_reach_a_worker_that_is_cut_off_and_its_late_messages_reach_nobody() -> None:
    async def scenario(runtime: SimRuntime) -> None:
        old = await runtime.spawn("w", PROBE)
        await asyncio.sleep(1.0)
        items = old.stream("count", 100, 0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(items)
        old.kill()
        assert await asyncio.shield(old.dead) == "was given up"
        new = await runtime.spawn("w", PROBE)
        assert new.epoch == old.epoch + 1
        await asyncio.sleep(20.0)
        assert await new.call("open_streams", timeout_s=30.0) == 0
        with pytest.raises(WorkerDied):
            await old.call("echo", 1, timeout_s=1.0)

    under(CUT, scenario)


def test_a_clock_that_jumps_makes_timers_late_and_keeps_their_order() -> None:
    async def main() -> list[tuple[int, float]]:
        loop, seen = asyncio.get_running_loop(), []
        for i in range(4):
            loop.call_at(1.0 + i, lambda i=i: seen.append((i, clock.now())))
        jump = ClockJump(at_s=0.5, by_s=2.0)
        loop.call_at(jump.at_s, loop.jump, jump.by_s)
        await asyncio.sleep(10.0)
        return seen

    assert millrace_sim.run(main(), seed=0) == [(0, 2.5), (1, 2.5), (2, 3.0), (3, 4.0)]
