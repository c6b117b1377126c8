"""What every runtime must do: one set of scenarios, run against each backend.

A scenario is an async function of a factory that makes a fresh runtime. It uses the running loop's
clock only, so it means the same under virtual time. A backend's test is three lines:

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
    def test_the_local_runtime_conforms(scenario):
        asyncio.run(scenario(LocalRuntime))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from millrace.core.errors import (
    DataError,
    DeadlineExceeded,
    RemoteError,
    StaleEpochError,
    WorkerDied,
    WorkerError,
)
from millrace.core.protocols import Handle, Runtime
from millrace.runtime.seam import PING, STREAM_WINDOW

PROBE = "millrace.runtime.probe:Probe"
WAIT_S = 120.0  # of the loop's clock: a scenario that needs it has failed. Under load a start takes 30 s

MakeRuntime = Callable[[], Runtime]
Scenario = Callable[[MakeRuntime], Awaitable[None]]


@asynccontextmanager
async def opened(make_runtime: MakeRuntime) -> AsyncIterator[Runtime]:
    runtime = make_runtime()
    try:
        yield runtime
    finally:
        await runtime.close()


async def call(handle: Handle, method: str, *args: Any) -> Any:
    return await handle.call(method, *args, timeout_s=WAIT_S)


async def eventually(handle: Handle, method: str, expected: Any) -> None:
    """Poll `method` until it answers `expected`."""
    async with asyncio.timeout(WAIT_S):
        while await call(handle, method) != expected:  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- calls


async def a_spawned_worker_answers_calls(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        assert isinstance(worker, Handle)
        assert worker.name == "probe"
        assert not worker.dead.done()
        assert await call(worker, "echo", {"tokens": [1, 2, 3]}) == {"tokens": [1, 2, 3]}
        assert (await call(worker, PING)).calls == []


async def our_errors_cross_as_themselves(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        for failure in ("ours", "locked_ours"):
            with pytest.raises(DataError) as caught:
                await call(worker, "fail", failure, "row 7 is empty")
            assert str(caught.value) == "row 7 is empty"
        assert await call(worker, "echo", 1) == 1


async def foreign_errors_carry_the_remote_traceback(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        with pytest.raises(RemoteError, match="ZeroDivisionError: by zero") as caught:
            await call(worker, "fail", "foreign", "by zero")
        assert "probe.py" in str(caught.value), "the remote traceback names the file"
        with pytest.raises(RemoteError, match="LockedError: cannot be pickled"):
            await call(worker, "fail", "locked", "cannot be pickled")
        assert await call(worker, "echo", 1) == 1


async def only_public_methods_can_be_called(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        for method in ("ecko", "_private", "__init__"):
            with pytest.raises(WorkerError, match=method):
                await call(worker, method)
        with pytest.raises(WorkerError, match="did you mean 'echo'"):
            await call(worker, "ecko")
        with pytest.raises(WorkerError, match="ecko"):
            async for _ in worker.stream("ecko"):
                pass


async def fifty_calls_run_at_the_same_time(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(worker, "meet", 50, i)) for i in range(50)]
        assert [task.result() for task in tasks] == list(range(50))


async def a_late_answer_is_an_error_that_says_whose(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("slow-probe", PROBE)
        with pytest.raises(DeadlineExceeded, match=r"slow-probe.*sleep"):
            await worker.call("sleep", 1000.0, timeout_s=0.05)
        assert not worker.dead.done()
        assert await call(worker, "echo", 1) == 1


async def a_begun_call_ends_in_a_function(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker, ends = await runtime.spawn("probe", PROBE), asyncio.Queue[tuple[Any, Exception | None]]()

        def done(value: Any, error: Exception | None) -> None:
            ends.put_nowait((value, error))

        worker.call_then("echo", 7, done=done)
        assert await asyncio.wait_for(ends.get(), WAIT_S) == (7, None)
        worker.call_then("fail", "ours", "row 7 is empty", done=done)
        value, error = await asyncio.wait_for(ends.get(), WAIT_S)
        assert (value, type(error), str(error)) == (None, DataError, "row 7 is empty")
        for _ in range(2):
            worker.call_then("sleep", 1000.0, done=done)
        await eventually(worker, "running", 2)
        worker.kill()
        deaths = [await asyncio.wait_for(ends.get(), WAIT_S) for _ in range(2)]
        assert [(value, type(error)) for value, error in deaths] == [(None, WorkerDied)] * 2
        with pytest.raises(WorkerDied):
            worker.call_then("echo", 8, done=done)
        assert ends.empty()


# ---------------------------------------------------------------- streams


async def a_stream_keeps_order_and_the_pace_of_its_consumer(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        num_items = 10 * STREAM_WINDOW
        seen: list[int] = []
        async for item in worker.stream("count", num_items):
            seen.append(item)
            if len(seen) < 5:
                await asyncio.sleep(0.01)
                assert await call(worker, "produced") <= len(seen) + STREAM_WINDOW
        assert seen == list(range(num_items))


async def streams_and_calls_share_a_worker(make_runtime: MakeRuntime) -> None:
    async def collect(worker: Handle) -> list[int]:
        return [item async for item in worker.stream("count", 100, 0.0001)]

    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(collect(worker)) for _ in range(3)]
            calls = [group.create_task(call(worker, "echo", i)) for i in range(20)]
        assert all(task.result() == list(range(100)) for task in streams)
        assert [task.result() for task in calls] == list(range(20))


async def an_answer_arrives_after_the_items_sent_before_it(make_runtime: MakeRuntime) -> None:
    seen: list[int] = []

    async def collect(worker: Handle) -> None:
        async with aclosing(worker.stream("listen")) as items:
            async for item in items:
                seen.append(item)
                if item == "end":
                    return

    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        async with asyncio.TaskGroup() as group:
            group.create_task(collect(worker))
            for i in range(5):
                await call(worker, "feed", [i] * 3)
                assert len(seen) == 3 * (i + 1)
            group.create_task(call(worker, "feed", ["end", "unread"]))


async def an_error_in_a_stream_follows_its_items(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        seen = []
        with pytest.raises(DataError, match="after the last item"):
            async for item in worker.stream("count", 3, 0.0, "ours"):
                seen += [item]
        assert seen == [0, 1, 2]


async def closing_a_stream_cancels_its_generator(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        for delay_s in (0.0, 1000.0):  # waiting for the consumer, and inside its own wait
            stream = worker.stream("count", 1000, delay_s)
            if delay_s == 0.0:
                assert await anext(stream) == 0
                await stream.aclose()
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await anext(stream)
                await stream.aclose()
            await eventually(worker, "open_streams", 0)


# ---------------------------------------------------------------- death


async def a_kill_ends_calls_in_flight(make_runtime: MakeRuntime) -> None:
    async def expect_death(worker: Handle) -> None:
        with pytest.raises(WorkerDied, match="probe"):
            await call(worker, "sleep", 1000.0)

    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        async with asyncio.TaskGroup() as group:
            group.create_task(expect_death(worker))
            await eventually(worker, "running", 1)
            worker.kill()
            worker.kill()
        assert await asyncio.wait_for(asyncio.shield(worker.dead), WAIT_S)
        with pytest.raises(WorkerDied):
            await call(worker, "echo", 1)


async def a_kill_ends_streams_in_flight(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        worker = await runtime.spawn("probe", PROBE)
        seen = []
        with pytest.raises(WorkerDied, match="probe"):
            async for item in worker.stream("count", 1_000_000, 0.001):
                seen.append(item)
                if len(seen) == 3:
                    worker.kill()
        assert seen == list(range(len(seen)))
        assert await asyncio.wait_for(asyncio.shield(worker.dead), WAIT_S)
        with pytest.raises(WorkerDied):
            await anext(worker.stream("count", 1))


async def one_death_leaves_the_others_alone(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        first = await runtime.spawn("first", PROBE)
        second = await runtime.spawn("second", PROBE)
        first.kill()
        await asyncio.wait_for(asyncio.shield(first.dead), WAIT_S)
        assert await call(second, "echo", 2) == 2
        assert not second.dead.done()


async def a_respawn_has_a_higher_epoch(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        old = await runtime.spawn("probe", PROBE)
        old.kill()
        await asyncio.wait_for(asyncio.shield(old.dead), WAIT_S)
        new = await runtime.spawn("probe", PROBE)
        assert new.epoch > old.epoch
        assert await call(new, "echo", 1) == 1
        with pytest.raises(WorkerDied):
            await call(old, "echo", 1)


async def a_command_for_an_earlier_epoch_is_refused(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        old = await runtime.spawn("probe", PROBE)
        old.kill()
        await asyncio.wait_for(asyncio.shield(old.dead), WAIT_S)
        new = await runtime.spawn("probe", PROBE)
        present, new.epoch = new.epoch, old.epoch
        with pytest.raises(StaleEpochError, match="probe"):
            await call(new, "echo", 1)
        with pytest.raises(StaleEpochError, match="probe"):
            await anext(new.stream("count", 3))
        new.epoch = present
        assert await call(new, "echo", 1) == 1


# ---------------------------------------------------------------- construction and the end


async def a_failing_constructor_is_the_error_of_spawn(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        with pytest.raises(DataError, match="no such model"):
            await runtime.spawn("probe", PROBE, {"fail": "ours", "message": "no such model"})
        with pytest.raises(RemoteError, match="ZeroDivisionError: by zero"):
            await runtime.spawn("probe", PROBE, {"fail": "foreign", "message": "by zero"})
        with pytest.raises(WorkerError, match="NoSuchClass"):
            await runtime.spawn("probe", "millrace.runtime.probe:NoSuchClass")
        task = asyncio.current_task()
        assert task is not None and not task.cancelling(), "a group that closed has cancelled its caller"
        worker = await runtime.spawn("probe", PROBE)
        assert worker.epoch > 1, "failed incarnations use up their epochs"
        assert await call(worker, "echo", 1) == 1


async def close_leaves_nothing_running(make_runtime: MakeRuntime) -> None:
    async with opened(make_runtime) as runtime:
        workers = [await runtime.spawn(f"probe-{i}", PROBE) for i in range(3)]
        await runtime.close()
        assert all(worker.dead.done() for worker in workers)
        with pytest.raises(WorkerDied):
            await call(workers[0], "echo", 1)
        with pytest.raises(WorkerError):
            await runtime.spawn("probe", PROBE)


SCENARIOS: tuple[Scenario, ...] = (
    a_spawned_worker_answers_calls,
    our_errors_cross_as_themselves,
    foreign_errors_carry_the_remote_traceback,
    only_public_methods_can_be_called,
    fifty_calls_run_at_the_same_time,
    a_late_answer_is_an_error_that_says_whose,
    a_begun_call_ends_in_a_function,
    a_stream_keeps_order_and_the_pace_of_its_consumer,
    streams_and_calls_share_a_worker,
    an_answer_arrives_after_the_items_sent_before_it,
    an_error_in_a_stream_follows_its_items,
    closing_a_stream_cancels_its_generator,
    a_kill_ends_calls_in_flight,
    a_kill_ends_streams_in_flight,
    one_death_leaves_the_others_alone,
    a_respawn_has_a_higher_epoch,
    a_command_for_an_earlier_epoch_is_refused,
    a_failing_constructor_is_the_error_of_spawn,
    close_leaves_nothing_running,
)

FOR_GANGS = tuple(
    scenario
    for scenario in SCENARIOS
    if "stream" not in scenario.__name__
    and "items" not in scenario.__name__
    and "begun" not in scenario.__name__
    and scenario is not a_command_for_an_earlier_epoch_is_refused  # it streams, and changes a handle's epoch
)
"""Of a worker of several processes, which has no streams and begins no calls."""
