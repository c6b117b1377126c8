"""A process that is stopped, wherever that hits it, is noticed and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.test_runtime_orphans import PROCESS, PYTHON_PATH, alive, until

from conformance import WAIT_S
from millrace.core.errors import DeadlineExceeded, WorkerDied
from millrace.runtime import process
from millrace.runtime.local import launcher, local_runtime
from millrace.runtime.local.local_runtime import LocalRuntime

PROBE = "millrace.runtime.probe:Probe"


def forkservers() -> list[int]:
    """Those of the runtime: tests of ranks leave one of their own in this process."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in process.children(os.getpid())}
    return [pid for pid, word in words.items() if b"forkserver" in word and b"['tests.ranks" not in word]


@pytest.mark.usefixtures("start_method")
def test_a_worker_frozen_while_it_is_made_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)

    async def run() -> None:
        runtime = LocalRuntime(answer_s=0.3)
        try:
            with pytest.raises(DeadlineExceeded, match="frozen"):
                await runtime.spawn("frozen", "tests.process.test_runtime_frozen:Freezes", timeout_s=60.0)
        finally:
            await runtime.close()

    asyncio.run(run())


class Freezes:
    """A worker that is stopped in its constructor."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_frozen_forkserver_is_replaced_by_the_next_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        runtime = LocalRuntime()
        try:
            first = await runtime.spawn("first", PROBE)
            os.kill(forkservers()[0], signal.SIGSTOP)
            with monkeypatch.context() as patch, pytest.raises(WorkerDied, match="forkserver"):
                patch.setattr(launcher, "LOOK_S", 0.3)
                await runtime.spawn("second", PROBE)
            assert "SIGKILL" in await first.dead
            third = await runtime.spawn("third", PROBE)
            assert await third.call("echo", 3, timeout_s=WAIT_S) == 3
        finally:
            await runtime.close()

    asyncio.run(run())


def test_a_frozen_forkserver_does_not_keep_a_runtime_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runtime, "CLOSE_TIMEOUT_S", 2.0)

    async def run() -> None:
        runtime = LocalRuntime()
        worker = await runtime.spawn("only", PROBE)
        server = forkservers()[0]
        os.kill(server, signal.SIGSTOP)
        await runtime.close()
        assert worker.dead.done()
        assert not alive(server)

    asyncio.run(run())


def test_a_frozen_forkserver_does_not_outlive_a_killed_controller() -> None:
    source = (
        "import asyncio, os, signal, sys\n"
        "from millrace.runtime import process\n"
        "from millrace.runtime.local.local_runtime import LocalRuntime\n"
        "async def main():\n"
        "    worker = await LocalRuntime().spawn('a', 'millrace.runtime.probe:Probe')\n"
        "    server = process.children(os.getpid())[0]\n"
        "    os.kill(server, signal.SIGSTOP)\n"
        "    os.kill(worker.pid, signal.SIGSTOP)\n"
        "    print(server, worker.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        controller.kill()
    assert len(pids) == 2
    assert until(lambda: not any(alive(pid) for pid in pids)), pids


def test_a_stuck_worker_writes_where_it_is_into_its_log(tmp_path: Path) -> None:
    async def run() -> None:
        runtime = LocalRuntime(("runtime_workers",), log_dir=tmp_path)
        try:
            worker = await runtime.spawn("stuck", PROCESS)
            async with asyncio.TaskGroup() as group:
                spinning = group.create_task(worker.call("spin", timeout_s=1000.0))
                log = tmp_path / "stuck.1.log"
                async with asyncio.timeout(WAIT_S):
                    while "in spin" not in log.read_text():
                        runtime.dump_stacks()
                        await asyncio.sleep(0.05)
                spinning.cancel()
        finally:
            await runtime.close()

    sys.path.insert(0, str(Path(__file__).parent))
    try:
        asyncio.run(run())
    finally:
        sys.path.remove(str(Path(__file__).parent))
