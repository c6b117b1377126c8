"""The controller's side of the forkserver: starts the forkserver, requests workers, learns of their ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from millrace.core.errors import DeadlineExceeded, WorkerDied, WorkerError
from millrace.core.placement import Place
from millrace.runtime import process
from millrace.runtime.local import forkserver

FORKS_IN_FLIGHT = 16
"""Bounds what the control socket must hold while the forkserver is still importing."""

LOOK_S, ANSWER_S = 1.0, 30.0
"""Between looks at a forkserver that owes an answer. A fork takes tens of milliseconds, or seconds where the
machine has no memory or cores left. A fork that takes longer than `ANSWER_S` will not come."""

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""For torch on a GPU. Rows have many lengths, so blocks of fixed sizes leave holes that no tensor fits into.
If the environment has PYTORCH_CUDA_ALLOC_CONF, the earlier name, torch follows that."""
DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1", **ALLOCATOR}
"""Variables of workers, unless the environment has others. A thread of torch that spins while it waits takes
another worker's core. With several malloc arenas, memory that one thread allocates and another thread frees
makes both arenas grow slowly for ever."""


@dataclass(frozen=True, slots=True)
class Child:
    """A forked process. Its owner closes `pidfd`."""

    pid: int
    pidfd: int


class Owner(Protocol):
    """The object that requested a process."""

    name: str

    def forked(self, child: Child) -> None:
        """The process exists. An owner that no longer wants the process must end it now."""

    def exited(self, cause: str) -> None:
        """The process ended by `cause`."""


class Launcher:
    """One forkserver, bound to the running loop.

    Waits for: packets on the control socket, and the forkserver's end, which a pidfd shows. When the
    forkserver ends, `gone` resolves to a cause, and the workers die.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[str] = self._loop.create_future()
        self._slots = asyncio.Semaphore(FORKS_IN_FLIGHT)
        self._ids = itertools.count(1)
        self._forks: dict[int, asyncio.Future[None]] = {}  # requested, not yet answered
        self._owners: dict[int, Owner] = {}
        self._pids: dict[int, int] = {}
        self._reason = ""
        self._ready_s: float | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            self._process = _start(theirs)
        self._pidfd = os.pidfd_open(self._process.pid)
        forkserver.send(
            self._control,
            forkserver.ForkserverSetup(os.getpid(), sys.path, os.environ.get("PYTHONPATH"), list(preload)),
        )
        self._loop.add_reader(self._control, self.drain)
        self._loop.add_reader(self._pidfd, self._ended)

    async def fork(
        self,
        owner: Owner,
        fds: Sequence[int],
        *,
        epoch: int,
        silence_s_max: float | None,
        place: Place,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """Fork a worker for `owner`. The worker gets `fds` (its socket, maybe a log file). `prefix` comes
        before the command that starts its Python.

        Raises: WorkerError (a module of the preload cannot be imported), WorkerDied (the forkserver).
        """
        async with self._slots:
            if self.gone.done():
                raise self._failure()
            fork_id = next(self._ids)
            command = forkserver.MakeWorker(
                fork_id,
                owner.name,
                epoch,
                silence_s_max,
                logs=len(fds) > 1,
                variables=place.variables,
                python=place.python,
                prefix=prefix,
            )
            forkserver.send(self._control, command, list(fds))
            self._owners[fork_id] = owner
            answer = self._forks[fork_id] = self._loop.create_future()
            try:
                await self._answered(answer)
            finally:
                del self._forks[fork_id]

    async def _answered(self, answer: asyncio.Future[None]) -> None:
        """Wait for `answer`. Kill a forkserver that is stopped, or silent for ANSWER_S after its imports. Its
        workers die too, and all of them start anew."""
        requested_s = self._loop.time()
        while not answer.done():
            await asyncio.wait([answer], timeout=LOOK_S)
            silent_s = self._loop.time() - max(requested_s, self._ready_s or requested_s)
            imported = self._ready_s is not None and silent_s >= ANSWER_S
            if not answer.done() and (imported or process.stopped(self._process.pid)):
                self._process.kill()
        await answer

    def drain(self) -> None:
        """Process every message that the forkserver has sent so far."""
        while not self.gone.done():
            try:
                packet, fds = forkserver.receive(self._control)
            except BlockingIOError:
                return
            except ConnectionError:
                packet, fds = b"", []
            if not packet:
                self._loop.remove_reader(self._control)
                return
            self._take(msgspec.msgpack.decode(packet, type=forkserver.Notice), fds)

    async def close(self, timeout_s: float) -> None:
        """Let the forkserver kill every descendant and exit. Raises: DeadlineExceeded.

        A forkserver that still imports reads no message. It has forked no worker yet, so it is killed.
        """
        if self._ready_s is None and not self.gone.done():
            self._process.kill()
        if not self.gone.done():
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([self.gone], timeout=timeout_s)
        if not self.gone.done():
            self._process.kill()
            await asyncio.wait([self.gone], timeout=timeout_s)
        if not self.gone.done():
            raise DeadlineExceeded(
                f"forkserver {self._process.pid}: workers live on {timeout_s:g} s after they were killed"
            )

    def _take(self, notice: forkserver.Notice, fds: list[int]) -> None:
        match notice:
            case forkserver.Forked():
                self._pids[notice.fork_id] = notice.pid
                self._owners[notice.fork_id].forked(Child(notice.pid, fds[0]))
                answer = self._forks.get(notice.fork_id)
                if answer is not None and not answer.done():
                    answer.set_result(None)
            case forkserver.Exited():
                del self._pids[notice.fork_id]
                self._owners.pop(notice.fork_id).exited(notice.cause)
            case forkserver.Ready():
                self._ready_s = self._loop.time()
            case forkserver.Broken():
                self._reason = notice.reason

    def _ended(self) -> None:
        self.drain()
        for fd in (self._control, self._pidfd):
            self._loop.remove_reader(fd)
        self._control.close()
        os.close(self._pidfd)
        self.gone.set_result(f"the forkserver {process.describe_exit(self._process.wait())}")
        for fork_id, pid in self._pids.items():  # the parent-death signal killed the worker, not its group
            self._owners[fork_id].exited(self.gone.result())
            process.kill(pid)
        for answer in self._forks.values():
            if not answer.done():
                answer.set_exception(self._failure())

    def _failure(self) -> WorkerError:
        return WorkerError(self._reason) if self._reason else WorkerDied(self.gone.result())


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Run the forkserver in its own process group, so that a terminal's Ctrl-C is the controller's."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", forkserver.__name__, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env={**DEFAULTS, **os.environ, **process.ONE_HASH_SEED, "PYTHONPATH": path},
        pass_fds=[theirs.fileno()],
        process_group=0,
    )
