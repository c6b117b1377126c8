"""Which call ends its worker: in virtual time, with heartbeats as the test makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import pytest

import millrace_sim
from millrace.controller.patience import FACTOR, FLOOR_S, Patience
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded
from millrace.core.progress import CallVitals, Vitals

LIMIT_S, HEARTBEAT_S = 600.0, 2.0
Report = Callable[[float], Sequence[CallVitals]]
"""What the worker says of its calls so many seconds after the first one began."""


class Slow:
    """A worker whose calls take as long as their argument says."""

    name, epoch = "trainer", 1

    async def call(self, method: str, *args: float, timeout_s: float) -> None:
        await asyncio.sleep(args[0])


def lasts(report: Report, *calls: tuple[str, float], cpu: float = 0.0, queued: float = 0.0) -> float:
    """How long `calls` (method, seconds) take together, with a heartbeat every two seconds. `cpu`, `queued`:
    the cores that the process has, and the cores that its threads wait for. Raises: the judgement over the
    calls."""
    patience, handle = Patience(LIMIT_S), Slow()

    async def main() -> float:
        began_s = clock.now()

        async def beat() -> None:
            while True:
                sent_s = clock.now()
                reported = list(report(sent_s - began_s))
                vitals = Vitals(cpu * sent_s, 0, False, reported, queued_s=queued * sent_s)
                patience.on_heartbeat(handle, vitals, sent_s)  # type: ignore[arg-type]
                await asyncio.sleep(HEARTBEAT_S)

        try:
            async with asyncio.TaskGroup() as group:
                heart = group.create_task(beat())
                await asyncio.gather(
                    *(patience.call(handle, method, took_s) for method, took_s in calls)  # type: ignore[arg-type]
                )
                heart.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return clock.now() - began_s

    return millrace_sim.run(main(), seed=0, time_max_s=1e6)


def one(method: str, done: Callable[[float], float], waits_for: str = "") -> Report:
    return lambda now_s: [CallVitals(method, int(done(now_s)), waits_for)]


def test_a_call_whose_count_grows_takes_as_long_as_it_takes_without_any_cpu_time() -> None:
    assert lasts(one("fetch", lambda now_s: now_s), ("fetch", 10_000.0)) == 10_000.0


def test_a_call_whose_count_stops_is_stuck_from_its_last_count_on() -> None:
    with pytest.raises(DeadlineExceeded, match=r"fetch was asked for 12\d s ago, and for 20 s it counted no"):
        lasts(one("fetch", lambda now_s: min(now_s, 100.0)), ("fetch", 10_000.0))


def test_a_call_that_computes_without_a_count_has_the_limit_and_no_more() -> None:
    with pytest.raises(DeadlineExceeded, match="step did not answer, and counted no progress for 600 s"):
        lasts(one("step", lambda now_s: 0), ("step", 10_000.0), cpu=1.0)


def test_a_call_whose_process_waits_for_a_core_has_the_limit_and_no_more() -> None:
    assert lasts(one("step", lambda now_s: 0), ("step", 500.0), cpu=0.01, queued=1.0) == 500.0
    with pytest.raises(DeadlineExceeded, match="step did not answer, and counted no progress for 600 s"):
        lasts(one("step", lambda now_s: 0), ("step", 10_000.0), cpu=0.01, queued=1.0)


def test_a_stuck_process_whose_heartbeats_wait_for_a_core_is_stuck_all_the_same() -> None:
    with pytest.raises(DeadlineExceeded, match=r"step was asked for 2\d s ago, and for 20 s it counted no"):
        lasts(one("step", lambda now_s: 0), ("step", 10_000.0), cpu=0.01, queued=0.4)


def test_a_call_that_waits_for_another_has_as_long_as_that_one_counts() -> None:
    def report(now_s: float) -> list[CallVitals]:
        return [CallVitals("step", 0, "await_saved"), CallVitals("await_saved", int(now_s))]

    assert lasts(report, ("step", 5000.0), ("await_saved", 4990.0)) == 5000.0


def test_a_call_that_waits_for_one_that_is_stuck_ends_with_it() -> None:
    def report(now_s: float) -> list[CallVitals]:
        return [CallVitals("step", 0, "await_saved"), CallVitals("await_saved")]

    with pytest.raises(DeadlineExceeded, match="await_saved was asked for 2"):
        lasts(report, ("step", 5000.0), ("await_saved", 4990.0))


@pytest.mark.parametrize("other", ["await_saved", "step"])
def test_to_wait_for_a_call_that_nobody_made_or_for_itself_is_no_progress(other: str) -> None:
    with pytest.raises(DeadlineExceeded, match="step was asked for 2"):
        lasts(one("step", lambda now_s: 0, other), ("step", 5000.0))


def test_a_call_of_several_ranks_counts_what_each_of_them_counts() -> None:
    def report(now_s: float) -> list[CallVitals]:
        return [CallVitals("step", 3), CallVitals("step", int(now_s))]

    assert lasts(report, ("step", 5000.0)) == 5000.0


COMPILES = "compiling program 3 (step)"


def test_a_call_that_names_what_it_does_has_the_limit_whatever_earlier_calls_took() -> None:
    def report(now_s: float) -> list[CallVitals]:
        return [CallVitals("step", activity=COMPILES if now_s > 10.0 else "")]

    patience, handle = Patience(LIMIT_S), Slow()

    async def main() -> list[str]:
        await patience.call(handle, "step", 1.0)  # type: ignore[arg-type]
        began_s, told = clock.now(), list[str]()

        async def beat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                now_s = clock.now()
                vitals = Vitals(now_s, 0, False, report(now_s - began_s))
                patience.on_heartbeat(handle, vitals, now_s)  # type: ignore[arg-type]
                told.extend(patience.activities())

        async with asyncio.TaskGroup() as group:
            heart = group.create_task(beat())
            await patience.call(handle, "step", 500.0)  # type: ignore[arg-type]
            heart.cancel()
        return told

    told = millrace_sim.run(main(), seed=0, time_max_s=1e6)
    assert told[0] == f"trainer, {COMPILES} for 0 s" and told[-1] == f"trainer, {COMPILES} for 488 s"


def test_a_deadline_names_what_the_worker_does() -> None:
    report = lambda now_s: [CallVitals("step", activity=COMPILES)]  # noqa: E731
    with pytest.raises(DeadlineExceeded, match=r"progress for 600 s, compiling program 3 \(step\) for"):
        lasts(report, ("step", 10_000.0), cpu=1.0)
    with pytest.raises(DeadlineExceeded, match=r"asked for 2\d s ago, compiling .* for 1\d s, and for 20 s"):
        lasts(report, ("step", 10_000.0))


def test_a_limit_follows_the_longest_time_without_a_count_and_forgets_after_a_deadline() -> None:
    patience, handle = Patience(LIMIT_S), Slow()

    async def took_s(call: Coroutine[None, None, None]) -> float:
        began_s = clock.now()
        with pytest.raises(DeadlineExceeded):
            await call
        return clock.now() - began_s

    async def main() -> list[float]:
        step = lambda seconds: patience.call(handle, "step", seconds)  # type: ignore[arg-type] # noqa: E731
        times = [await took_s(step(1e5))]
        await step(1.0)
        times.append(await took_s(step(1e5)))
        await step(7.0)
        times.append(await took_s(step(1e5)))
        times.append(await took_s(step(1e5)))
        return times

    assert millrace_sim.run(main(), seed=0, time_max_s=1e6) == [LIMIT_S, FLOOR_S, FACTOR * 7.0, LIMIT_S]


@pytest.mark.parametrize(("cpu", "queued", "took_s"), [(1.0, 0, 20), (0.5, 0.5, 20), (0.01, 0.99, LIMIT_S)])
def test_the_limit_of_a_call_is_later_by_the_time_for_which_its_process_got_no_core(
    cpu: float, queued: float, took_s: float
) -> None:
    patience, handle = Patience(LIMIT_S), Slow()

    async def beat() -> None:
        while True:
            now_s = clock.now()
            vitals = Vitals(cpu * now_s, 0, False, [CallVitals("step")], queued_s=queued * now_s)
            patience.on_heartbeat(handle, vitals, now_s)  # type: ignore[arg-type]
            await asyncio.sleep(HEARTBEAT_S)

    async def main() -> float:
        await patience.call(handle, "step", 1.0)  # type: ignore[arg-type]
        began_s = clock.now()
        async with asyncio.TaskGroup() as group:
            heart = group.create_task(beat())
            with pytest.raises(DeadlineExceeded, match=f"counted no progress for {took_s:g} s"):
                await patience.call(handle, "step", 1e5)  # type: ignore[arg-type]
            heart.cancel()
        return clock.now() - began_s

    assert millrace_sim.run(main(), seed=0, time_max_s=1e6) == took_s


def test_a_count_does_not_lengthen_the_limit_of_later_calls() -> None:
    patience, handle = Patience(LIMIT_S), Slow()

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(patience.call(handle, "pull", 500.0))  # type: ignore[arg-type]
            for done in range(250):
                await asyncio.sleep(HEARTBEAT_S)
                vitals = Vitals(0.0, 0, False, [CallVitals("pull", done + 1)])
                patience.on_heartbeat(handle, vitals, clock.now())  # type: ignore[arg-type]
            await call
        began_s = clock.now()
        with pytest.raises(DeadlineExceeded):
            await patience.call(handle, "pull", 1e5)  # type: ignore[arg-type]
        return clock.now() - began_s

    assert millrace_sim.run(main(), seed=0, time_max_s=1e6) <= FACTOR * 2 * HEARTBEAT_S
