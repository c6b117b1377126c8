"""The controller's side of one worker process: calls, streams, its end."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from millrace.core.errors import DataError, RemoteError
from millrace.core.placement import Place
from millrace.core.protocols import Done
from millrace.runtime import process
from millrace.runtime.local.framing import Framing, Kind, Payload
from millrace.runtime.local.launcher import Child, Launcher
from millrace.runtime.process import DUMP_STACKS
from millrace.runtime.seam import CREDIT_STEP, PING, STREAM_WINDOW, died, late, where

DRAIN_S = 0.005
"""How long the report of a death waits, while the last bytes of the worker are read."""

END_TIMEOUT_S = 10.0


class LocalHandle:
    """One incarnation of one worker process; see `core.protocols.Handle`.

    The pidfd alone decides that the worker is gone. When the socket closes earlier, nobody can command the
    worker any more, so it is killed.
    """

    def __init__(self, name: str, epoch: int, launcher: Launcher) -> None:
        self.name, self.epoch = name, epoch
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[str] = self._loop.create_future()
        self._launcher = launcher
        self._framing = Framing(self._receive, self._disconnected)
        self._connected = False
        self._child: Child | None = None
        self._ended = False
        self._cause: str | None = None
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, Callable[[Kind, Any], None]]] = {}

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def suspended(self) -> bool:
        """Whether somebody has stopped its process (SIGSTOP, a debugger)."""
        return self._child is not None and process.stopped(self._child.pid)

    # ------------------------------------------------------------ commands

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self._answer(Kind.CALL, method, (method, args), timeout_s)

    def call_then(self, method: str, *args: Any, done: Done) -> None:
        def deliver(kind: Kind, value: Any) -> None:
            del self._pending[call_id]
            if kind is Kind.ERROR:
                done(None, value)
            else:
                done(value, None)

        call_id = self._open(Kind.CALL, method, (method, args), deliver)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        inbox = _Inbox()
        command = (method, args, STREAM_WINDOW)
        call_id = self._open(Kind.STREAM, method, command, inbox.put)
        complete = False
        try:
            for num_taken in itertools.count(1):
                kind, value = await inbox.get()
                if kind is not Kind.ITEM:
                    complete = True
                    if kind is Kind.ERROR:
                        raise value
                    return
                yield value
                if num_taken % CREDIT_STEP == 0:
                    self._framing.send(Kind.CREDIT, self.epoch, call_id, CREDIT_STEP)
        finally:
            del self._pending[call_id]
            complete = complete or any(kind is not Kind.ITEM for kind, _ in inbox.messages)
            if not complete:
                self._framing.send(Kind.CANCEL, self.epoch, call_id, None)

    def dump_stacks(self) -> None:
        """The worker writes the stacks of its threads and tasks into its log."""
        self._signal(DUMP_STACKS)

    def kill(self) -> None:
        """SIGKILL now. The forkserver kills the worker's process group when it sees the end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._child is not None and not self._ended:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._child.pidfd, number)

    # ------------------------------------------------------------ the runtime's part

    async def start(
        self, place: Place, silence_s_max: float | None, log_fd: int | None, prefix: tuple[str, ...] = ()
    ) -> None:
        """Fork the process and connect to it. Raises: WorkerError, WorkerDied (of the forkserver)."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self._loop.create_unix_connection(lambda: self._framing, sock=ours)
            self._connected = True
            fds = [theirs.fileno()] if log_fd is None else [theirs.fileno(), log_fd]
            await self._launcher.fork(
                self, fds, epoch=self.epoch, silence_s_max=silence_s_max, place=place, prefix=prefix
            )

    async def construct(self, target: str, kwargs: Mapping[str, Any], answer_s: float | None) -> None:
        """Make the worker's object. There is no time limit while the worker answers pings within `answer_s`
        (None: no pings). Raises: as `call`."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(answer_s), name=f"{self.name}.construct")
                await self._answer(Kind.CONSTRUCT, target, (target, dict(kwargs)), None)
                watch.cancel()
                await asyncio.wait([watch])  # see `GangHandle.start`: what fails now must fail in the group
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _watch(self, answer_s: float | None) -> None:
        while answer_s is not None:
            await self.call(PING, timeout_s=answer_s)
            await asyncio.sleep(answer_s / 3)

    async def end(self) -> None:
        """Kill the worker and wait, for END_TIMEOUT_S at most, until the worker is gone."""
        self.kill()
        if self._child is None:
            self._report_death("never started")
        await asyncio.wait([self.dead], timeout=END_TIMEOUT_S)

    def forked(self, child: Child) -> None:
        """Own `child` from now on."""
        self._child = child
        self._loop.add_reader(child.pidfd, self._process_ended)
        if self.dead.done():  # killed in the meantime
            self.kill()

    def exited(self, cause: str) -> None:
        """The forkserver reports how the worker ended."""
        self._cause = self._cause or cause

    # ------------------------------------------------------------ messages

    async def _answer(
        self, kind: Kind, method: str, command: tuple[Any, ...], timeout_s: float | None
    ) -> Any:
        answer: asyncio.Future[Any] = self._loop.create_future()

        def deliver(kind: Kind, value: Any) -> None:
            if answer.done():
                return
            if kind is Kind.ERROR:
                answer.set_exception(value)
            else:
                answer.set_result(value)

        def expire(timeout_s: float) -> None:
            deliver(Kind.ERROR, late(self.name, self.epoch, method, timeout_s))

        call_id = self._open(kind, method, command, deliver)
        timer = (
            None
            if timeout_s is None or timeout_s == math.inf
            else self._loop.call_later(timeout_s, expire, timeout_s)
        )
        try:
            return await answer
        finally:
            del self._pending[call_id]
            if timer is not None:
                timer.cancel()

    def _open(
        self, kind: Kind, method: str, command: tuple[Any, ...], deliver: Callable[[Kind, Any], None]
    ) -> int:
        if self.dead.done():
            raise died(self.name, self.epoch, method, self.dead.result())
        call_id = next(self._ids)
        try:
            self._framing.send(kind, self.epoch, call_id, command, urgent=method == PING)
        except Exception as error:
            place = where(self.name, self.epoch, method)
            raise DataError(
                f"{place}: arguments cannot be pickled: {type(error).__name__}: {error}"
            ) from error
        self._pending[call_id] = method, deliver
        return call_id

    def _receive(self, kind: Kind, epoch: int, call_id: int, payload: Payload) -> None:
        if call_id not in self._pending:  # its caller waits no more
            return
        method, deliver = self._pending[call_id]
        try:
            value = payload.value() if kind is not Kind.END else None
        except Exception as error:
            place = where(self.name, epoch, method)
            kind, value = Kind.ERROR, RemoteError(f"{place}: cannot unpickle what it sent: {error!r}")
        deliver(kind, value)

    # ------------------------------------------------------------ the end

    def _disconnected(self) -> None:
        self._connected = False
        if self._ended:
            self._report_death()
        else:
            self.kill()

    def _process_ended(self) -> None:
        assert self._child is not None
        self._loop.remove_reader(self._child.pidfd)
        os.close(self._child.pidfd)
        self._ended = True
        # Either the forkserver has reported the cause, or it has not reaped the worker, and /proc has the
        # cause.
        self._cause = self._cause or process.zombie_exit(self._child.pid)
        if self._cause is None:
            self._launcher.drain()
        if self._connected:
            self._loop.call_later(DRAIN_S, self._report_death)
        else:
            self._report_death()

    def _report_death(self, cause: str = "the cause is unknown") -> None:
        if self.dead.done():
            return
        self.dead.set_result(self._cause or cause)
        self._framing.close()
        for method, deliver in [*self._pending.values()]:
            deliver(Kind.ERROR, died(self.name, self.epoch, method, self.dead.result()))


class _Inbox:
    """Messages of one stream that nobody has read. The stream's window bounds them."""

    def __init__(self) -> None:
        self.messages: deque[tuple[Kind, Any]] = deque()
        self._more: asyncio.Future[None] | None = None

    def put(self, kind: Kind, value: Any) -> None:
        self.messages.append((kind, value))
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def get(self) -> tuple[Kind, Any]:
        """Only one coroutine reads a stream."""
        while not self.messages:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        return self.messages.popleft()
