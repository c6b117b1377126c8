from __future__ import annotations

import asyncio
import random
import sys
import weakref
from collections.abc import AsyncIterator

import pytest

import millrace_sim
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded, MillraceError
from tests.long import long


def test_time_starts_at_zero_and_jumps_exactly_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop, seen = asyncio.get_running_loop(), [clock.now()]
        for when in (0.1, 0.1 + 1e-12, 86_400.0 * 365, 1e9 + 0.25):
            reached = loop.create_future()
            loop.call_at(when, reached.set_result, None)
            await reached
            seen.append(clock.now())
        return seen

    assert millrace_sim.run(main(), seed=0) == [0.0, 0.1, 0.1 + 1e-12, 86_400.0 * 365, 1e9 + 0.25]


def test_wall_time_is_virtual_too() -> None:
    async def main() -> float:
        await asyncio.sleep(12.5)
        return clock.wall()

    assert millrace_sim.run(main(), seed=0) == 12.5


def test_timeouts_queues_and_task_groups_work_unchanged() -> None:
    async def main() -> tuple[list[int], float]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        taken: list[int] = []

        async def produce() -> None:
            for i in range(3):
                await asyncio.sleep(1.0)
                await queue.put(i)

        async def consume() -> None:
            while True:
                taken.append(await queue.get())

        async with asyncio.TaskGroup() as group:
            consumer = group.create_task(consume())
            await group.create_task(produce())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5):
                    await consumer
        return taken, clock.now()

    assert millrace_sim.run(main(), seed=0) == ([0, 1, 2], 5.5)


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for timer in [loop.call_later(100.0 + i, pytest.fail) for i in range(1000)]:
            timer.cancel()
        await asyncio.sleep(1.0)
        return clock.now()

    assert millrace_sim.run(main(), seed=0) == 1.0


def test_a_deadlock_names_every_waiting_task_and_where_it_waits() -> None:
    queue: asyncio.Queue[None] = asyncio.Queue()

    async def items() -> AsyncIterator[None]:
        while True:
            yield await queue.get()

    async def read() -> None:
        async for _ in items():
            pass

    async def main() -> None:
        await asyncio.sleep(3.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(read(), name="reader")
            group.create_task(asyncio.Event().wait(), name="sleeper")

    with pytest.raises(millrace_sim.DeadlockError, match=r"deadlock at virtual time 3\.0 s") as caught:
        millrace_sim.run(main(), seed=0)
    waiting = {wait.task: wait.place for wait in caught.value.waiting}
    assert set(waiting) == {"task-1", "reader", "sleeper"}
    assert "test_sim_loop.py" in waiting["reader"]
    assert "items -> asyncio/queues.py" in waiting["reader"]
    assert waiting["reader"].endswith("in Queue.get")
    assert waiting["sleeper"].endswith("in Event.wait")
    assert all(f"{name}: {place}" in str(caught.value) for name, place in waiting.items())


def test_a_deadlock_is_a_millrace_error() -> None:
    assert issubclass(millrace_sim.DeadlockError, MillraceError)


def test_a_run_past_its_time_limit_says_who_waits() -> None:
    async def tick() -> None:
        while True:  # noqa: ASYNC110 - the point of the test
            await asyncio.sleep(1.0)

    with pytest.raises(DeadlineExceeded, match=r"(?s)limit of 10\.0 s.*task-1.*in .*tick"):
        millrace_sim.run(tick(), seed=0, time_max_s=10.0)


def test_polling_without_sleeping_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_sim.virtual.loop.SPIN_MAX", 1000)

    async def poll() -> None:
        while True:  # noqa: ASYNC110 - the point of the test
            await asyncio.sleep(0)

    with pytest.raises(millrace_sim.DeadlockError, match="polls without sleeping"):
        millrace_sim.run(poll(), seed=0)


def test_an_exception_that_nobody_handles_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(2.0)

    with pytest.raises(ZeroDivisionError):
        millrace_sim.run(main(), seed=0)


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(MillraceError, match="threads are not simulated"):
        millrace_sim.run(main(), seed=0)


def order_of_simultaneous_timers(seed: int) -> list[int]:
    async def main() -> list[int]:
        order: list[int] = []
        for i in range(20):
            asyncio.get_running_loop().call_at(1.0, order.append, i)
        await asyncio.sleep(2.0)
        return order

    return millrace_sim.run(main(), seed=seed)


def test_simultaneous_timers_run_in_an_order_that_the_seed_decides() -> None:
    orders = [order_of_simultaneous_timers(seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(20))


def test_sets_of_tasks_and_futures_have_the_same_order_in_every_run() -> None:
    async def main() -> list[str]:
        clutter = [object() for _ in range(random.randrange(1000))]  # moves addresses about
        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(asyncio.sleep(1.0), name=f"t{i}") for i in range(50)}
        futures = {asyncio.get_running_loop().create_future(): str(i) for i in range(50)}
        assert len(clutter) < 1000
        return [*(task.get_name() for task in tasks), *(futures[future] for future in set(futures))]

    assert millrace_sim.run(main(), seed=0) == millrace_sim.run(main(), seed=0)


def test_an_abandoned_generator_is_finalized_at_the_same_point_of_every_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millrace_sim.virtual.loop.COLLECT_EVERY", 1000)

    async def main() -> list[float]:
        closed: list[float] = []

        async def items() -> AsyncIterator[int]:
            try:
                while True:
                    yield 1
            finally:
                closed.append(clock.now())

        async def abandon() -> None:
            generator = items()
            cycle = [generator]
            cycle.append(cycle)  # type: ignore[arg-type]
            await anext(generator)

        await abandon()
        for _ in range(1000):
            await asyncio.sleep(1.0)
        return closed

    runs = [millrace_sim.run(main(), seed=0) for _ in range(2)]
    assert runs[0] == runs[1] != []


class World:
    """What a run is about; only the collector frees it."""

    def __init__(self) -> None:
        self.parts: list[object] = [self, *([] for _ in range(20_000))]


@long
def test_worlds_of_earlier_runs_do_not_pile_up() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)

    blocks = sys.getallocatedblocks()  # of all tests before: garbage may be a quarter of as much
    count = 40 + 2 * blocks // 4 // 20_000
    earlier: list[weakref.ref[World]] = []
    for _ in range(count):
        world = World()
        earlier.append(weakref.ref(world))
        millrace_sim.run(main(), seed=0)
    assert sum(world() is not None for world in earlier) < 3 * count / 4
