"""What the local runtime does beyond the scenarios that every runtime passes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import WAIT_S
from millrace.core.errors import DataError, DeadlineExceeded, RemoteError, WorkerDied, WorkerError
from millrace.runtime.local import local_runtime
from millrace.runtime.local.framing import Kind
from millrace.runtime.local.handle import LocalHandle
from millrace.runtime.local.local_runtime import LocalRuntime

PROCESS = "runtime_workers:Process"
PROBE = "millrace.runtime.probe:Probe"


def test_a_runtime_that_still_imports_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runtime, "CLOSE_TIMEOUT_S", 1000.0)

    async def run() -> None:
        runtime = LocalRuntime(preload=("runtime_slow_module",))
        spawn = asyncio.create_task(runtime.spawn("worker", PROCESS))
        await asyncio.sleep(0)
        spawn.cancel()
        await asyncio.wait([spawn])
        async with asyncio.timeout(60):
            await runtime.close()

    asyncio.run(run())


def with_worker(
    use: Callable[[LocalHandle], Awaitable[None]], runtime: LocalRuntime | None = None, target: str = PROCESS
) -> None:
    async def run() -> None:
        opened = runtime or LocalRuntime()
        try:
            await use(await opened.spawn("worker", target))
        finally:
            await opened.close()

    asyncio.run(run())


async def call(worker: LocalHandle, method: str, *args: Any) -> Any:
    return await worker.call(method, *args, timeout_s=WAIT_S)


async def cause_of_death(worker: LocalHandle) -> str:
    return await asyncio.wait_for(asyncio.shield(worker.dead), WAIT_S)


# ---------------------------------------------------------------- death


def test_a_worker_that_outlives_its_kill_is_named_when_the_runtime_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millrace.runtime.workers.CLOSE_TIMEOUT_S", 0.01)

    class Undying(LocalHandle):
        def __init__(self) -> None:
            self.name, self.epoch = "worker", 1
            self.dead = asyncio.get_running_loop().create_future()

        def kill(self) -> None:
            pass

    async def run() -> None:
        runtime = LocalRuntime()
        runtime._workers._handles.add(Undying())
        with pytest.raises(DeadlineExceeded, match=r"worker \(epoch 1\)"):
            await runtime.close()

    asyncio.run(run())


@pytest.mark.usefixtures("start_method")
def test_a_worker_killed_from_outside_tells_its_signal() -> None:
    async def use(worker: LocalHandle) -> None:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert await cause_of_death(worker) == "killed by signal 9 (SIGKILL)"
        with pytest.raises(WorkerDied, match=r"worker \(epoch 1\): number.*SIGKILL"):
            await call(worker, "number")

    with_worker(use)


@pytest.mark.usefixtures("start_method")
def test_a_worker_that_exits_tells_its_code() -> None:
    async def use(worker: LocalHandle) -> None:
        with pytest.raises(WorkerDied, match="exited with code 3"):
            await call(worker, "exit", 3)
        assert await cause_of_death(worker) == "exited with code 3"

    with_worker(use)


@pytest.mark.parametrize("state", ["stopped", "spinning"])
@pytest.mark.usefixtures("start_method")
def test_a_worker_that_cannot_answer_can_be_killed(state: str) -> None:
    async def use(worker: LocalHandle) -> None:
        assert worker.pid is not None
        if state == "stopped":
            os.kill(worker.pid, signal.SIGSTOP)
        else:
            with pytest.raises(DeadlineExceeded):
                await worker.call("spin", timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await worker.call("number", timeout_s=0.05)
        worker.kill()
        assert "SIGKILL" in await cause_of_death(worker)

    with_worker(use)


@pytest.mark.usefixtures("start_method")
def test_a_worker_warns_of_python_in_a_file_and_not_of_a_text_that_it_parses() -> None:
    async def use(worker: LocalHandle) -> None:
        assert "an odd piece" in "".join(await call(worker, "warned_of", "reward.py"))
        assert await call(worker, "warned_of", "<unknown>") == []

    with_worker(use)


@pytest.mark.usefixtures("start_method")
def test_sigint_and_sigterm_are_left_to_the_controller() -> None:
    async def use(worker: LocalHandle) -> None:
        assert worker.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
            assert await call(worker, "number") == 1
        assert await call(worker, "forked_child_ended_by", signal.SIGTERM) == signal.SIGTERM

    with_worker(use)


@pytest.mark.usefixtures("start_method")
def test_a_worker_that_hears_nothing_for_too_long_stops_itself() -> None:
    async def use(worker: LocalHandle) -> None:
        assert "fell silent" in await cause_of_death(worker)

    with_worker(use, LocalRuntime(silence_s_max=1.0))


@pytest.mark.usefixtures("start_method")
def test_a_worker_busy_for_too_long_hears_what_waited_for_it(tmp_path: Path) -> None:
    asked, silence_s_max = tmp_path / "asked", 1.5

    async def use(worker: LocalHandle) -> None:
        words = worker.stream("block", 1.1 * silence_s_max, str(asked))
        assert await anext(words) == "blocking"
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(call(worker, "number"))
            await asyncio.sleep(0)  # the call is on its way
            asked.touch()
        assert waiting.result() == 1 and await anext(words) == "blocked"

    with_worker(use, LocalRuntime(silence_s_max=silence_s_max))


# ---------------------------------------------------------------- messages


@pytest.mark.usefixtures("start_method")
def test_what_cannot_be_pickled_fails_its_own_call_only() -> None:
    async def use(worker: LocalHandle) -> None:
        with pytest.raises(DataError, match=r"number.*cannot be pickled"):
            await call(worker, "number", lambda: None)
        with pytest.raises(RemoteError, match="pickle"):
            await call(worker, "lambda_")
        with pytest.raises(RemoteError, match="pickle"):
            await anext(worker.stream("lambdas"))
        assert await call(worker, "number") == 1

    with_worker(use)


@pytest.mark.usefixtures("start_method")
def test_calls_and_streams_are_not_mixed_up() -> None:
    async def use(worker: LocalHandle) -> None:
        with pytest.raises(WorkerError, match="plain is not an async method"):
            await call(worker, "plain")
        with pytest.raises(WorkerError, match="lambdas is not an async method"):
            await call(worker, "lambdas")
        with pytest.raises(WorkerError, match="number is not an async generator"):
            await anext(worker.stream("number"))

    with_worker(use)


@pytest.mark.usefixtures("start_method")
def test_a_message_larger_than_any_buffer_arrives_whole() -> None:
    async def use(worker: LocalHandle) -> None:
        value = os.urandom(8_000_000)
        assert await call(worker, "echo", value) == value

    with_worker(use, target=PROBE)


@pytest.mark.parametrize(
    ("num_items", "kinds"), [(3, [Kind.CALL]), (100, [Kind.CALL, Kind.CANCEL, Kind.CALL])]
)
def test_leaving_a_stream_tells_its_worker_only_if_it_goes_on_and_is_not_answered(
    num_items: int, kinds: list[Kind]
) -> None:
    sent, received = list[Kind](), list[Kind]()

    async def use(worker: LocalHandle) -> None:
        framing = worker._framing
        send, receive = framing.send, framing._receive
        items = worker.stream("count", num_items)
        assert [await anext(items) for _ in range(3)] == [0, 1, 2]
        framing.send = lambda kind, *rest, **how: (sent.append(kind), send(kind, *rest, **how))
        await call(worker, "echo", 1)  # what the worker sent before has come
        framing._receive = lambda kind, *rest: (received.append(kind), receive(kind, *rest))
        await items.aclose()
        if num_items > 3:
            await call(worker, "echo", 1)
        assert sent == kinds and Kind.ERROR not in received

    with_worker(use, target=PROBE)


# ---------------------------------------------------------------- the process


def test_preloaded_modules_are_shared_and_the_environment_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_TEST", "ours")

    async def run() -> None:
        runtime = LocalRuntime(preload=("runtime_workers",))
        a, b = [await call(await runtime.spawn(name, PROCESS), "facts") for name in "ab"]
        assert a["loaded_by"] == b["loaded_by"] == a["parent"] == b["parent"]
        assert a["env"] == "ours"
        assert a["threads"] == os.environ.get("OMP_NUM_THREADS", "1")
        assert a["python_path"] == os.environ.get("PYTHONPATH")
        assert a["main"].endswith("forkserver.py"), "the user's script is not run again"
        await runtime.close()

    asyncio.run(run())


@pytest.mark.usefixtures("start_method")
def test_the_number_of_threads_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    async def use(worker: LocalHandle) -> None:
        assert (await call(worker, "facts"))["threads"] == "3"

    with_worker(use)


def test_a_module_that_cannot_be_preloaded_is_named() -> None:
    async def run() -> None:
        runtime = LocalRuntime(preload=("no_such_module",))
        with pytest.raises(WorkerError, match="no_such_module"):
            await runtime.spawn("worker", PROCESS)
        await runtime.close()

    asyncio.run(run())


@pytest.mark.usefixtures("start_method")
def test_a_class_of_the_users_script_is_refused() -> None:
    async def run() -> None:
        runtime = LocalRuntime()
        with pytest.raises(WorkerError, match="move the class to a module"):
            await runtime.spawn("worker", "__main__:Worker")
        await runtime.close()

    asyncio.run(run())


@pytest.mark.usefixtures("start_method")
def test_output_goes_to_a_private_file_for_each_incarnation(tmp_path: Path) -> None:
    async def run() -> None:
        runtime = LocalRuntime(log_dir=tmp_path / "logs")
        for epoch in (1, 2):
            worker = await runtime.spawn("host/worker", PROCESS)
            await call(worker, "say", f"hello {epoch}")
            worker.kill()
            await cause_of_death(worker)
            path = tmp_path / "logs" / f"host_worker.{epoch}.log"
            assert path.read_text() == f"hello {epoch}\n" * 2
            assert path.stat().st_mode & 0o777 == 0o600
        await runtime.close()

    asyncio.run(run())


@pytest.mark.usefixtures("start_method")
def test_many_workers_start_at_once_and_two_runtimes_live_side_by_side() -> None:
    async def run() -> None:
        runtimes = [LocalRuntime(), LocalRuntime()]
        async with asyncio.TaskGroup() as group:
            spawns = [group.create_task(r.spawn(f"w{i}", PROCESS)) for r in runtimes for i in range(10)]
        pids = [(await call(spawn.result(), "facts"))["pid"] for spawn in spawns]
        assert len(set(pids)) == 20
        await runtimes[0].close()
        assert await call(spawns[-1].result(), "number") == 1
        await runtimes[1].close()

    asyncio.run(run())


def test_closing_a_runtime_that_never_spawned_is_nothing() -> None:
    asyncio.run(LocalRuntime().close())


def test_epochs_go_on_in_the_next_session_of_a_run(tmp_path: Path) -> None:
    async def session() -> int:
        runtime = LocalRuntime(log_dir=tmp_path)
        worker = await runtime.spawn("host/worker", PROCESS)
        await runtime.close()
        return worker.epoch

    assert [asyncio.run(session()) for _ in range(2)] == [1, 2]
