"""Nothing outlives a controller or a worker, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from start_methods import METHODS
from tests.long import covering, long

from conformance import WAIT_S
from millrace.runtime import process
from millrace.runtime.local.local_runtime import LocalRuntime

HERE = Path(__file__).parent
PYTHON_PATH = os.pathsep.join([str(HERE), *filter(None, sys.path)])
PROCESS = "runtime_workers:Process"
GONE_WITHIN_S = WAIT_S
LOOK_S = 0.05


def marked(mark: str) -> list[int]:
    """Living processes that have `mark` in their initial environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def until(claim: Callable[[], bool]) -> bool:
    """Looks are counted, not seconds: a machine that was suspended, or gave no time, costs one look."""
    for _ in range(round(GONE_WITHIN_S / LOOK_S)):
        if claim():
            return True
        time.sleep(LOOK_S)
    return claim()


def told(mark: str) -> str:
    """What the living processes with `mark` are and do."""
    files = ("cmdline", "status", "wchan", "syscall", "stack")
    return "\n".join(f"{pid} {name}: {_read(pid, name)}" for pid in marked(mark) for name in files)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().replace("\0", " ")
    except OSError as error:
        return str(error)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    value = uuid.uuid4().hex
    yield value
    for pid in marked(value):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def start_parent(mark: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "runtime_parent.py")]
    env = {**os.environ, "RUNTIME_TEST": mark, "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(tmp_path)}
    out, quiet = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stdout=out, stderr=quiet, text=True) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def named_files(pid: int) -> set[str]:
    """Shared-memory files, temporary files and bound sockets that `pid` holds."""
    sockets = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7:
            sockets[f"socket:[{fields[6]}]"] = fields[7]
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    maps = [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {sockets[name] for name in links if name in sockets} | {
        name for name in links + maps if name.startswith("/dev/shm")
    }


@pytest.mark.parametrize(
    ("number", "start_method"),
    covering([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], METHODS),
    indirect=["start_method"],
)
def test_nothing_outlives_a_controller_that_gets(
    number: signal.Signals, start_method: str, mark: str, tmp_path: Path
) -> None:
    with start_parent(mark, tmp_path) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["main\n", "ready\n"], "__main__ ran once"
        size = 1 + 1 + 4 + 3
        assert until(lambda: len(marked(mark)) == size), "controller, forkserver, workers, children of one"
        assert set().union(*map(named_files, marked(mark))) == set(), "nothing to leave behind but processes"
        parent.send_signal(number)
        parent.wait(GONE_WITHIN_S)
        assert until(lambda: not marked(mark)), told(mark)
    assert list(tmp_path.iterdir()) == []


def test_a_forkserver_suspended_at_that_moment_still_ends_every_descendant(mark: str, tmp_path: Path) -> None:
    with start_parent(mark, tmp_path) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["main\n", "ready\n"]
        (forkserver,) = process.children(parent.pid)
        os.kill(forkserver, signal.SIGSTOP)
        parent.kill()
    assert until(lambda: not marked(mark)), told(mark)


@long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_nothing_outlives_an_exploration_that_gets(number: signal.Signals, mark: str) -> None:
    command = [sys.executable, "-m", "millrace", "simulate", "--chaos", "1000000", "--jobs", "2"]
    env = {**os.environ, "RUNTIME_TEST": mark}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet) as parent:
        assert until(lambda: len(marked(mark)) == 4), (
            "the command, two that explore, Python's resource tracker"
        )
        parent.send_signal(number)
        parent.wait(GONE_WITHIN_S)
        assert until(lambda: not marked(mark)), told(mark)


def test_nothing_outlives_a_controller_killed_while_modules_are_preloaded(mark: str) -> None:
    script = (
        "import asyncio; from millrace.runtime.local.local_runtime import LocalRuntime\n"
        "print('ready', flush=True)\n"
        "asyncio.run(LocalRuntime(preload=('runtime_slow_module',)).spawn('a', 'runtime_workers:Process'))"
    )
    env = {**os.environ, "RUNTIME_TEST": mark, "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert until(lambda: len(marked(mark)) == 2)
        parent.kill()
    assert until(lambda: not marked(mark)), told(mark)


@pytest.mark.usefixtures("start_method")
def test_a_busy_worker_ends_with_a_forkserver_and_a_controller_killed_together(mark: str) -> None:
    script = (
        "import asyncio, start_methods; from millrace.runtime.local.local_runtime import LocalRuntime\n"
        "async def main():\n"
        "    worker = await LocalRuntime().spawn('a', 'runtime_workers:Process')\n"
        "    facts = await worker.call('facts', timeout_s=120.0)\n"
        "    items = worker.stream('block', 1000.0)\n"
        "    await anext(items)\n"
        "    print(facts['parent'], flush=True)\n"
        "    await anext(items)\n"
        "asyncio.run(main())"
    )
    env = {**os.environ, "RUNTIME_TEST": mark, "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        forkserver = int(parent.stdout.readline())
        parent.send_signal(signal.SIGSTOP)
        os.kill(forkserver, signal.SIGKILL)
        parent.kill()
    assert until(lambda: not marked(mark)), told(mark)


@pytest.mark.usefixtures("start_method")
def test_the_children_of_a_killed_worker_end_and_those_of_others_go_on() -> None:
    async def run() -> None:
        runtime = LocalRuntime()
        first, second = [await runtime.spawn(name, PROCESS) for name in ("first", "second")]
        doomed, spared = [await worker.call("children", timeout_s=WAIT_S) for worker in (first, second)]
        assert all(map(alive, doomed + spared))
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(first.dead), WAIT_S)
        assert until(lambda: not any(map(alive, doomed)))
        assert all(map(alive, spared))
        await runtime.close()
        assert not any(map(alive, spared)), "close waits for them"

    asyncio.run(run())


@pytest.mark.usefixtures("start_method")
def test_the_end_of_the_forkserver_is_the_end_of_its_workers_and_the_next_spawn_starts_another() -> None:
    async def run() -> None:
        runtime = LocalRuntime()
        old = await runtime.spawn("probe", PROCESS)
        facts = await old.call("facts", timeout_s=WAIT_S)
        os.kill(facts["parent"], signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(old.dead), WAIT_S)
        new = await runtime.spawn("probe", PROCESS)
        assert new.epoch > old.epoch
        assert await new.call("number", timeout_s=WAIT_S) == 1
        await runtime.close()
        assert not alive(facts["pid"])

    asyncio.run(run())


@pytest.mark.parametrize("end", ["deadline", "cancellation"])
@pytest.mark.usefixtures("start_method")
def test_a_spawn_that_is_given_up_leaves_no_process(
    end: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_TEST", mark)

    async def run() -> None:
        runtime = LocalRuntime()
        await runtime.spawn("first", PROCESS)
        assert len(marked(mark)) == 2
        with pytest.raises(TimeoutError):
            if end == "deadline":
                await runtime.spawn("slow", PROCESS, {"block_s": 1000.0}, timeout_s=0.2)
            else:
                async with asyncio.timeout(0.2):
                    await runtime.spawn("slow", PROCESS, {"block_s": 1000.0})
        assert until(lambda: len(marked(mark)) == 2)
        await runtime.close()
        assert marked(mark) == []

    asyncio.run(run())
