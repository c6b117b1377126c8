"""Logical hosts of one machine: workers under the prefix of their host."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance import WAIT_S
from millrace.core.errors import WorkerDied, WorkerError
from millrace.core.placement import Place
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.runtime.process import UNSUITABLE_PYTHON, describe_exit

TELLS = """
import os
import millrace

class Tells:
    async def facts(self):
        network = os.readlink("/proc/self/ns/net")
        return {"pid": os.getpid(), "there": os.environ.get("THERE"), "network": network}

    async def child(self):
        import subprocess
        return subprocess.Popen(["sleep", "60"]).pid
"""
THERE = ("env", "THERE=yes")
"""A prefix that anybody may use, and that becomes the command by exec."""


@pytest.fixture(autouse=True)
def _role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_workers_of_a_host_with_a_prefix_run_under_it_and_are_killed_and_logged_as_any(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        runtime = LocalRuntime(log_dir=tmp_path, hosts={"far": THERE, "near": ()})
        try:
            here = await runtime.spawn("here", "tells:Tells")
            near = await runtime.spawn("near", "tells:Tells", place=Place(host="near"))
            far = await runtime.spawn("far", "tells:Tells", place=Place(host="far"))
            answers = [(await one.call("facts", timeout_s=WAIT_S))["there"] for one in (here, near, far)]
            assert answers == [None, None, "yes"]
            child = await far.call("child", timeout_s=WAIT_S)
            os.kill(far.pid, signal.SIGKILL)
            assert "SIGKILL" in await asyncio.wait_for(asyncio.shield(far.dead), WAIT_S)
            again = await runtime.spawn("far", "tells:Tells", place=Place(host="far"))
            assert again.epoch == 2 and (await again.call("facts", timeout_s=WAIT_S))["there"] == "yes"
            await _until(lambda: not Path(f"/proc/{child}").exists())
            again.dump_stacks()
            await _until(lambda: "File" in (tmp_path / "far.2.log").read_text())
        finally:
            await runtime.close()

    asyncio.run(run())


def test_ranks_of_a_worker_are_on_its_host(tmp_path: Path) -> None:
    async def run() -> None:
        runtime = LocalRuntime(log_dir=tmp_path, hosts={"far": THERE})
        try:
            gang = await runtime.spawn("gang", "tells:Tells", place=Place(host="far", ranks=2))
            assert (await gang.call("facts", timeout_s=WAIT_S))["there"] == "yes"
        finally:
            await runtime.close()

    asyncio.run(run())


def test_an_unknown_host_and_a_prefix_that_cannot_start_are_errors_that_name_them(tmp_path: Path) -> None:
    async def run() -> str:
        runtime = LocalRuntime(log_dir=tmp_path, hosts={"far": ("no-such-command",)})
        try:
            with pytest.raises(WorkerError, match=r"'mars'.*'localhost', 'far'"):
                await runtime.spawn("worker", "tells:Tells", place=Place(host="mars"))
            with pytest.raises(WorkerDied) as died:
                await runtime.spawn("worker", "tells:Tells", place=Place(host="far"))
            return str(died.value)
        finally:
            await runtime.close()

    assert describe_exit(UNSUITABLE_PYTHON) in asyncio.run(run())
    assert "no-such-command cannot be started" in (tmp_path / "worker.1.log").read_text()


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"millrace-{os.getpid()}"
    tool = shutil.which("ip")
    made = tool and subprocess.run([tool, "netns", "add", name], capture_output=True, check=False)
    if not made or made.returncode:
        pytest.skip("network namespaces cannot be made here: it takes root and iproute2")
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


def test_a_host_can_be_a_network_namespace(tmp_path: Path, namespace: str) -> None:
    async def run() -> None:
        runtime = LocalRuntime(log_dir=tmp_path, hosts={"far": ("ip", "netns", "exec", namespace)})
        try:
            here = await runtime.spawn("here", "tells:Tells")
            far = await runtime.spawn("far", "tells:Tells", place=Place(host="far"))
            networks = [(await one.call("facts", timeout_s=WAIT_S))["network"] for one in (here, far)]
            assert networks[0] != networks[1]
            assert (await far.call("facts", timeout_s=WAIT_S))["pid"] == far.pid
            far.kill()
            await asyncio.wait_for(asyncio.shield(far.dead), WAIT_S)
        finally:
            await runtime.close()

    asyncio.run(run())


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.01)
