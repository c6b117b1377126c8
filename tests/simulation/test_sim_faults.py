"""What the simulated runtime does to workers, and that it keeps them apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import millrace_sim
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded, WorkerDied, WorkerError
from millrace_sim.virtual.sim_runtime import SimRuntime

PROBE = "millrace.runtime.probe:Probe"
STILL = millrace_sim.Latency(base_s=0.001, jitter_s=0.0)


def under(
    faults: millrace_sim.Faults,
    scenario: Callable[[SimRuntime], Awaitable[Any]],
    *,
    seed: int = 0,
    **options: Any,
) -> Any:
    async def main() -> Any:
        runtime = SimRuntime(seed, faults=faults, **{"latency": STILL, **options})
        try:
            return await scenario(runtime)
        finally:
            await runtime.close()

    return millrace_sim.run(main(), seed=seed, time_max_s=1e6)


async def lifetime_s(runtime: SimRuntime, name: str) -> float:
    worker = await runtime.spawn(name, PROBE)
    born = clock.now()
    await asyncio.shield(worker.dead)
    return clock.now() - born


def test_a_named_worker_crashes_at_its_time() -> None:
    async def scenario(runtime: SimRuntime) -> float:
        other = await runtime.spawn("replica-10", PROBE)
        await lifetime_s(runtime, "replica-1")
        assert not other.dead.done()
        return clock.now()

    faults = millrace_sim.Faults(crashes=(millrace_sim.Crash("replica-1", at_s=2.5),), notice_s=0.25)
    assert under(faults, scenario) == 2.75


def test_a_crash_hits_the_incarnation_that_is_alive_then() -> None:
    async def scenario(runtime: SimRuntime) -> list[int]:
        epochs = []
        for _ in range(2):
            worker = await runtime.spawn("w", PROBE)
            await asyncio.shield(worker.dead)
            epochs.append(worker.epoch)
        last = await runtime.spawn("w", PROBE)
        await asyncio.sleep(100.0)
        assert not last.dead.done()
        return epochs

    faults = millrace_sim.Faults(
        crashes=(millrace_sim.Crash("w", at_s=1.0), millrace_sim.Crash("w", at_s=5.0))
    )
    assert under(faults, scenario) == [1, 2]


def test_lifetimes_have_the_mean_that_was_asked_for_and_follow_the_seed() -> None:
    async def few(runtime: SimRuntime) -> list[float]:
        return [await lifetime_s(runtime, "w") for _ in range(20)]

    async def many(runtime: SimRuntime) -> list[float]:
        return [await lifetime_s(runtime, "w") for _ in range(400)]

    faults = millrace_sim.Faults(failures=(millrace_sim.Failures("w", mtbf_s=50.0),))
    lifetimes = under(faults, many, seed=3)
    assert 43.0 < sum(lifetimes) / len(lifetimes) < 57.0
    assert under(faults, few, seed=3) == under(faults, few, seed=3) != under(faults, few, seed=4)


def test_a_killed_worker_falls_silent_at_once() -> None:
    async def scenario(runtime: SimRuntime) -> None:
        worker = await runtime.spawn("w", PROBE)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(outcome(worker.call("sleep", 0.01, timeout_s=9)))
            await asyncio.sleep(0.005)
            worker.kill()  # its notice comes long after the answer would have
        assert isinstance(call.result(), WorkerDied)

    under(millrace_sim.Faults(notice_s=1.0), scenario)


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except WorkerError as error:
        return error


def test_a_worker_that_dies_while_it_starts_is_the_error_of_spawn() -> None:
    async def scenario(runtime: SimRuntime) -> None:
        async with asyncio.TaskGroup() as group:
            spawn = group.create_task(outcome(runtime.spawn("w", PROBE)))
            await asyncio.sleep(1.0)
            runtime.crash("w")
        assert isinstance(spawn.result(), WorkerDied)

    under(millrace_sim.Faults(spawn_s=(5.0, 5.0)), scenario)


def test_a_start_that_takes_too_long_is_late() -> None:
    async def scenario(runtime: SimRuntime) -> float:
        with pytest.raises(DeadlineExceeded, match=r"w \(epoch 1\): start .* within 3 s"):
            await runtime.spawn("w", PROBE, timeout_s=3.0)
        return clock.now()

    assert under(millrace_sim.Faults(spawn_s=(10.0, 10.0)), scenario) == 3.0


def test_a_second_worker_of_a_living_name_is_refused() -> None:
    async def scenario(runtime: SimRuntime) -> None:
        await runtime.spawn("w", PROBE)
        with pytest.raises(WorkerError, match=r"w is running \(epoch 1\): kill it first"):
            await runtime.spawn("w", PROBE)

    under(millrace_sim.Faults(), scenario)


def test_lag_cuts_a_worker_off_while_it_keeps_running() -> None:
    async def scenario(runtime: SimRuntime) -> int:
        worker = await runtime.spawn("w", PROBE)
        await asyncio.sleep(10.0 - clock.now())
        stream = worker.stream("count", 5, 0.001)
        with pytest.raises(DeadlineExceeded):
            await worker.call("echo", 1, timeout_s=30.0)
        assert [item async for item in stream] == list(range(5))
        return await worker.call("produced", timeout_s=1.0)

    faults = millrace_sim.Faults(lags=(millrace_sim.Lag("w", extra_s=60.0, start_s=10.0, end_s=20.0),))
    assert under(faults, scenario) == 5


def test_messages_of_one_direction_never_overtake_each_other() -> None:
    async def scenario(runtime: SimRuntime) -> list[int]:
        worker = await runtime.spawn("w", PROBE)
        return [item async for item in worker.stream("count", 2000)]

    spikes = millrace_sim.Latency(spike_probability=0.1, spike_s=1.0)
    assert under(millrace_sim.Faults(), scenario, latency=spikes) == list(range(2000))


@pytest.mark.parametrize("isolate", [True, False])
def test_what_a_receiver_changes_its_sender_does_not_see_unless_messages_are_shared(isolate: bool) -> None:
    async def scenario(runtime: SimRuntime) -> bool:
        worker = await runtime.spawn("w", PROBE)
        sent = [1, 2]
        received = await worker.call("echo", sent, timeout_s=1.0)
        received.append(3)
        return sent == [1, 2]

    assert under(millrace_sim.Faults(), scenario, isolate=isolate) is isolate
