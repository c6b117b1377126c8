"""Workers that misbehave as only processes can."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from millrace.core.errors import DataError
from millrace.core.progress import count

LOADED_BY = os.getpid()


class Process:
    """Tells about itself and ends in unusual ways."""

    def __init__(self, *, block_s: float = 0.0) -> None:
        time.sleep(block_s)

    async def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "loaded_by": LOADED_BY,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "python_path": os.environ.get("PYTHONPATH"),
            "env": os.environ.get("RUNTIME_TEST"),
            "main": getattr(sys.modules["__main__"], "__file__", ""),
        }

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    async def order_of_a_set(self) -> list[str]:
        return list(set("abcdefghij"))

    async def exit(self, code: int) -> None:
        raise SystemExit(code)

    async def say(self, text: str) -> None:
        print(text)
        print(text, file=sys.stderr)

    async def warned_of(self, file: str) -> list[str]:
        """What is told of a piece of Python in the file with that name."""
        told: list[str] = []
        sys.stderr, shown = SimpleNamespace(write=told.append, flush=lambda: None), sys.stderr  # type: ignore
        warnings.warn_explicit("an odd piece", SyntaxWarning, file, 1)
        sys.stderr = shown
        return told

    async def block(self, seconds: float, until: str | None = None) -> AsyncIterator[str]:
        """Say so, then hold the loop for that time and until the file `until` is there, then say so."""
        yield "blocking"
        time.sleep(seconds)  # noqa: ASYNC251
        while until is not None and not Path(until).exists():  # noqa: ASYNC240
            time.sleep(0.01)  # noqa: ASYNC251
        yield "blocked"

    async def spin(self) -> None:
        while True:
            pass

    async def hang_on_a_lock(self) -> None:
        """In a thread, so that the loop goes on: heartbeats are answered."""
        lock = threading.Lock()
        lock.acquire()
        await asyncio.to_thread(lock.acquire)

    async def compute(self, seconds: float) -> None:
        """In a thread too."""
        await asyncio.to_thread(_compute, time.monotonic() + seconds)

    async def receive_slowly(self, seconds: float, counted_s: float) -> None:
        """As from a slow peer, which sends nothing after `counted_s`: it uses no CPU time."""
        end_s = time.monotonic() + seconds
        while (remaining_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(0.2)
            if seconds - remaining_s < counted_s:
                count()

    async def wait_for_a_child(self, seconds: float) -> None:
        """It computes in a child, and waits in a thread."""
        command = [sys.executable, "-c", f"import time\nwhile time.process_time() < {seconds}: pass"]
        await asyncio.to_thread(subprocess.run, command, check=True)

    async def lambda_(self) -> Any:
        return lambda: None

    async def lambdas(self) -> AsyncIterator[Any]:
        yield lambda: None

    def plain(self) -> int:
        return 1

    async def number(self) -> int:
        return 1

    async def children(self) -> list[int]:
        """Start a child, one in a session of its own, and one whose own parent ends at once."""
        return _start_children()

    async def forked_child_ended_by(self, number: int) -> int:
        """Fork without exec, send the child a signal and return the one that ended it."""
        return _fork_and_signal(number)


class Answer(NamedTuple):
    digest: str


class Rank:
    """One of several; `unfit`: the rank that cannot be made, for which the others wait."""

    def __init__(self, *, unfit: int | None = None) -> None:
        self._rank = int(os.environ["RANK"])
        if unfit == self._rank:
            raise DataError(f"rank {unfit} cannot be made")
        if unfit is not None:
            threading.Event().wait()

    async def variables(self) -> dict[str, str]:
        return dict(os.environ)

    async def agree(self, digest: str) -> Answer:
        return Answer(digest)

    async def differ(self) -> Answer:
        return Answer(str(self._rank))

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def fail(self, ranks: list[int], others_wait: bool = False) -> None:
        if self._rank in ranks:
            raise DataError(f"raised by rank {self._rank}")
        if others_wait:
            await self.wait()


def _compute(until_s: float) -> None:
    while time.monotonic() < until_s:
        sum(range(1000))


def _start_children() -> list[int]:
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = subprocess.Popen(sleep)
    leader = subprocess.Popen(sleep, start_new_session=True)
    script = (
        f"import subprocess as s; print(s.Popen({sleep!r}, stdout=s.DEVNULL, start_new_session=True).pid)"
    )
    made = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True)
    return [child.pid, leader.pid, int(made.stdout)]


def _fork_and_signal(number: int) -> int:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"up")
        time.sleep(1000)
        os._exit(0)
    os.read(reader, 2)
    os.kill(pid, number)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])
