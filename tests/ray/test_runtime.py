"""The runtime on Ray passes the scenarios that every runtime passes, and what it promises beyond them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ray import clusters

from conformance import FOR_GANGS, SCENARIOS, WAIT_S, Scenario
from millrace.core.errors import DataError, DeadlineExceeded, RemoteError, WorkerDied, WorkerError
from millrace.core.placement import Place
from millrace.runtime import process
from millrace.runtime.logs import LOG_BYTES_MAX
from millrace.runtime.workers import GangHandle
from millrace_ray.ray_runtime import RayRuntime
from millrace_ray.remote_handle import RayHandle

PROCESS = "runtime_workers:Process"
RANK = "runtime_workers:Rank"
PROBE = "millrace.runtime.probe:Probe"

STALL_S = 5.0
"""Silence that ends a worker. A full machine delays messages by seconds."""


class TwoRanks(RayRuntime):
    """Every worker has two."""

    async def spawn(self, *args: Any, **more: Any) -> Any:
        return await super().spawn(*args, **{"place": Place(ranks=2)} | more)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_runtime_on_ray_conforms(scenario: Scenario, address: str) -> None:
    asyncio.run(scenario(partial(RayRuntime, address)))


@pytest.mark.parametrize("scenario", FOR_GANGS, ids=lambda scenario: scenario.__name__)
def test_a_gang_on_ray_conforms(scenario: Scenario, address: str) -> None:
    asyncio.run(scenario(partial(TwoRanks, address)))


@pytest.fixture(autouse=True)
def logs_of_a_test_that_fails(tmp_path: Path) -> Iterator[None]:
    yield
    for log in tmp_path.glob("*.log"):
        print(f"{log.name}:\n{log.read_text(errors='replace')}")


def with_worker(
    runtime: RayRuntime, use: Callable[[Any], Awaitable[None]], target: str = PROCESS, place: Place = Place()
) -> None:
    async def run() -> None:
        try:
            await use(await runtime.spawn("worker", target, place=place, timeout_s=WAIT_S))
        finally:
            await runtime.close()

    asyncio.run(run())


async def call(worker: RayHandle | GangHandle[RayHandle], method: str, *args: Any) -> Any:
    return await worker.call(method, *args, timeout_s=WAIT_S)


async def cause_of_death(worker: RayHandle) -> str:
    return await asyncio.wait_for(asyncio.shield(worker.dead), WAIT_S)


def servers(pid: int) -> list[int]:
    """The processes of clusters' heads, of those below `pid`."""
    lines = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in process.descendants(pid)}
    return [child for child, line in lines.items() if b"/gcs_server" in line.split(b"\0")[0]]


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while Path(f"/proc/{pid}").exists() and process.zombie_exit(pid) is None:  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------- death


@pytest.mark.smoke
def test_a_worker_killed_from_outside_is_dead_at_once_and_its_children_too(address: str) -> None:
    async def use(worker: RayHandle) -> None:
        child, *_ = await call(worker, "children")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert "Ray: " in await cause_of_death(worker)
        with pytest.raises(WorkerDied, match=r"worker \(epoch 1\): number"):
            await call(worker, "number")
        await until_gone(child)

    with_worker(RayRuntime(address), use)


@pytest.mark.parametrize("state", ["stopped", "spinning"])
def test_a_worker_that_cannot_answer_can_be_killed(state: str, address: str) -> None:
    async def use(worker: RayHandle) -> None:
        assert worker.pid is not None
        if state == "stopped":
            os.kill(worker.pid, signal.SIGSTOP)
        else:
            with pytest.raises(DeadlineExceeded):
                await worker.call("spin", timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await worker.call("__ping__", timeout_s=0.5)
        assert worker.suspended == (state == "stopped")
        worker.kill()
        assert await cause_of_death(worker) == "killed"
        await until_gone(worker.pid)

    with_worker(RayRuntime(address), use)


def test_a_worker_that_hears_nothing_for_too_long_ends_itself_and_says_so(
    address: str, tmp_path: Path
) -> None:
    async def use(worker: RayHandle) -> None:
        await cause_of_death(worker)
        assert "its controller fell silent" in (tmp_path / "worker.1.log").read_text()

    with_worker(RayRuntime(address, silence_s_max=2.0, log_dir=tmp_path), use)


def test_a_worker_that_is_busy_keeps_its_lease_as_long_as_it_is_asked(address: str, tmp_path: Path) -> None:
    async def use(worker: RayHandle) -> None:
        async def read() -> list[str]:
            return [word async for word in worker.stream("block", 1.1 * STALL_S)]

        async with asyncio.TaskGroup() as group:
            reading, unanswered = group.create_task(read()), 0
            while not reading.done():
                try:
                    await worker.call("__ping__", timeout_s=0.3)
                except DeadlineExceeded:
                    unanswered += 1
                await asyncio.sleep(0.1)
        assert reading.result() == ["blocking", "blocked"]
        assert unanswered

    with_worker(RayRuntime(address, silence_s_max=STALL_S, log_dir=tmp_path), use)


def test_a_worker_that_could_not_run_sees_what_waited_for_it_before_it_ends_itself(
    address: str, tmp_path: Path
) -> None:
    async def use(worker: RayHandle) -> None:
        assert worker.pid is not None
        await call(worker, "__ping__")
        os.kill(worker.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(call(worker, "__ping__"))
        await asyncio.sleep(1.1 * STALL_S)
        os.kill(worker.pid, signal.SIGCONT)
        for _ in range(10):
            await call(worker, "__ping__")
            await asyncio.sleep(0.1)
        await waiting

    with_worker(RayRuntime(address, silence_s_max=STALL_S, log_dir=tmp_path), use)


def test_a_controller_that_goes_on_with_a_run_kills_what_the_one_before_left(
    address: str, tmp_path: Path
) -> None:
    left_over = f"""
import asyncio, os
from millrace_ray.ray_runtime import RayRuntime
from pathlib import Path
async def main():
    runtime = RayRuntime({address!r}, run_id="one", log_dir=Path({str(tmp_path)!r}))
    worker = await runtime.spawn("worker", {PROBE!r})
    print(worker.pid, flush=True)
    os.kill(os.getpid(), 19)
asyncio.run(main())
"""

    async def use(worker: RayHandle) -> None:
        assert worker.epoch == 2, "epochs go on from the logs of the run"
        assert worker.pid != old_pid
        await until_gone(old_pid)

    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", left_over], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as before:
        assert before.stdout is not None
        old_pid = int(before.stdout.readline())
        with_worker(RayRuntime(address, run_id="one", log_dir=tmp_path), use)
        before.kill()


# ---------------------------------------------------------------- messages


def test_what_cannot_be_pickled_fails_its_own_call_only(address: str) -> None:
    async def use(worker: RayHandle) -> None:
        with pytest.raises(DataError, match=r"number.*cannot be pickled"):
            await call(worker, "number", lambda: None)
        with pytest.raises(RemoteError, match="pickle"):
            await call(worker, "lambda_")
        with pytest.raises(RemoteError, match="pickle"):
            await anext(worker.stream("lambdas"))
        assert await call(worker, "number") == 1

    with_worker(RayRuntime(address), use)


def test_a_large_message_arrives_whole(address: str) -> None:
    async def use(worker: RayHandle) -> None:
        value = bytearray(os.urandom(8_000_000))
        answer = await call(worker, "echo", value)
        assert answer == value
        answer[0] = 0  # it is ours to change

    with_worker(RayRuntime(address), use, PROBE)


# ---------------------------------------------------------------- the process


def test_a_worker_has_its_variables_its_directory_and_a_private_log(address: str, tmp_path: Path) -> None:
    async def use(worker: RayHandle) -> None:
        assert await call(worker, "variable", "CUDA_VISIBLE_DEVICES") == "2,3"
        assert await call(worker, "variable", "RUNTIME_TEST") == "ours"
        await call(worker, "say", "hello")
        log = tmp_path / "worker.1.log"
        assert log.stat().st_mode & 0o777 == 0o600
        assert log.read_text().count("hello\n") == 2

    place = Place(devices=(2, 3), environ={"RUNTIME_TEST": "ours"})
    with_worker(RayRuntime(address, log_dir=tmp_path), use, place=place)


def test_the_log_of_a_worker_that_prints_without_end_is_bounded(address: str, tmp_path: Path) -> None:
    async def use(worker: RayHandle) -> None:
        await call(worker, "say", "x" * (LOG_BYTES_MAX // 2 + 1))
        log = tmp_path / "worker.1.log"
        async with asyncio.timeout(WAIT_S):
            while not log.read_text().startswith("(too long"):  # noqa: ASYNC110 - its last part is kept by now
                await asyncio.sleep(0.05)
        await call(worker, "say", "goes on")
        text = log.read_text()
        assert text.count("goes on\n") == 2 and len(text) < 1000
        assert log.with_name("worker.1.log.1").exists()

    with_worker(RayRuntime(address, log_dir=tmp_path), use)


@pytest.mark.smoke
def test_the_ranks_of_a_gang_know_their_places_and_where_they_meet(address: str) -> None:
    async def use(worker: GangHandle[RayHandle]) -> None:
        variables = [await member.call("variables", timeout_s=WAIT_S) for member in worker.members]
        assert [one["RANK"] for one in variables] == ["0", "1"]
        meeting = {one["MILLRACE_RENDEZVOUS"] for one in variables}
        assert meeting == {f"file:///proc/{worker.pid}/fd/{meeting.copy().pop().rpartition('/')[2]}"}

    with_worker(RayRuntime(address), use, RANK, Place(ranks=2))


@pytest.mark.parametrize("head", ["answers", "does not run"])
def test_a_rank_that_dies_is_the_death_of_all(head: str, address: str) -> None:
    """The head tells of a death. Without its word an actor whose connection has ended is unavailable."""

    async def use(worker: GangHandle[RayHandle]) -> None:
        [server], before = servers(os.getpid()), set(threading.enumerate())
        if head == "does not run":
            os.kill(server, signal.SIGSTOP)
        try:
            os.kill(worker.pids[1] or 0, signal.SIGKILL)
            assert "rank 1: Ray:" in await asyncio.wait_for(asyncio.shield(worker.dead), WAIT_S)
        finally:
            os.kill(server, signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):  # calls waited for the head
            while any(one.name == "a call of Ray's" for one in {*threading.enumerate()} - before):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    with_worker(RayRuntime(address), use, RANK, Place(ranks=2))


def test_a_host_that_is_no_node_is_named_beside_those_that_are(address: str) -> None:
    async def run() -> None:
        runtime = RayRuntime(address)
        try:
            with pytest.raises(WorkerError, match=r"'elsewhere' is no live node of the cluster: there are "):
                await runtime.spawn("worker", PROBE, place=Place(host="elsewhere"))
        finally:
            await runtime.close()

    asyncio.run(run())


# ---------------------------------------------------------------- clusters


def test_a_cluster_that_is_started_here_ends_with_the_runtime() -> None:
    async def use(worker: RayHandle) -> None:
        assert await call(worker, "number") == 1
        started.extend(set(process.descendants(os.getpid())) - before)

    before, started = set(process.descendants(os.getpid())), list[int]()
    with_worker(RayRuntime(), use)
    assert started and not set(started) & set(process.descendants(os.getpid()))


def test_a_cluster_that_is_not_there_is_one_error_that_says_where() -> None:
    async def run() -> None:
        with pytest.raises(WorkerError, match=r"cannot use the Ray cluster at '127.0.0.1:1'"):
            await RayRuntime("127.0.0.1:1").spawn("worker", PROBE)

    asyncio.run(run())


def test_a_head_that_is_gone_is_named_and_its_controller_ends_though_ray_waits(tmp_path: Path) -> None:
    controller = """
import asyncio, sys
from millrace.core.errors import ClusterError
from millrace_ray.ray_runtime import RayRuntime
async def main():
    runtime = RayRuntime(sys.argv[1])
    worker = await runtime.spawn("worker", "millrace.runtime.probe:Probe")
    print("up", flush=True)
    try:
        await worker.dead
        await runtime.spawn("another", "millrace.runtime.probe:Probe")
    finally:
        await runtime.close()
try:
    asyncio.run(main())
except ClusterError as error:
    sys.exit(f"ended: {error}")
"""
    port = clusters.free_port()
    address = f"127.0.0.1:{port}"
    head = ("--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false")
    path = os.pathsep.join(sys.path)
    with clusters.node(*head) as node:
        command = [sys.executable, "-c", controller, address]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        ) as running:
            assert running.stdout is not None and running.stdout.readline() == b"up\n"
            [server] = servers(node.pid)
            os.kill(server, signal.SIGKILL)
            _, error = running.communicate(timeout=WAIT_S)
    assert f"ended: the head of the Ray cluster, {address}, takes no connection" in error.decode()
    assert "The program will terminate" not in error.decode(), "Ray ends a process after a minute"


def test_sets_have_one_order_in_all_workers_on_ray(address: str) -> None:
    orders = []

    async def use(worker: RayHandle) -> None:
        orders.append(await call(worker, "order_of_a_set"))

    for _ in range(2):
        with_worker(RayRuntime(address), use)
    without_seed = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-c", "print(*set('abcdefghij'))"]
    seeded = subprocess.run(
        command, env=without_seed | process.ONE_HASH_SEED, capture_output=True, text=True, check=True
    )
    assert orders == [seeded.stdout.split()] * 2
