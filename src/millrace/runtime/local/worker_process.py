"""The worker's side of the wire: one object, its methods run as tasks of one event loop.

SIGTERM is a notice that the host goes away. The worker calls the method `notice` of an object that has one.
Then the process ends `GRACE_S` later, unless the controller has ended it by then. Without this method nothing
happens.

Waits for: messages of the controller. Ends: when the controller's socket closes, or when the controller has
been silent for too long. A worker without a controller must not go on. Both checks need a loop that turns.
The forkserver kills a worker that is stuck in C code.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import warnings
from contextlib import aclosing
from typing import Any

from millrace.core.errors import StaleEpochError
from millrace.runtime.local.framing import Framing, Kind, Payload
from millrace.runtime.process import CONTROLLER_LOST, CUT_OFF, NOTICED, answer_dumps
from millrace.runtime.seam import PING, ExecutedCalls, begin_stream, crossing, load_class, where
from millrace.runtime.vitals import VitalSigns

GRACE_S = 25.0
"""Clouds and Kubernetes kill 30 s after a notice, or later."""


def main(connection: socket.socket, name: str, epoch: int, silence_s_max: float | None) -> None:
    """Serve until the process is stopped."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    # Python 3.12 warns of a `"\d"` in a text that it parses, which here is a model's or a row's.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")
    asyncio.run(_serve(connection, name, epoch, silence_s_max))


async def _serve(connection: socket.socket, name: str, epoch: int, silence_s_max: float | None) -> None:
    loop = asyncio.get_running_loop()
    answer_dumps()
    async with asyncio.TaskGroup() as tasks:
        worker = Worker(name, epoch, silence_s_max, tasks)
        loop.add_signal_handler(signal.SIGTERM, worker.noticed)
        await loop.create_unix_connection(lambda: worker.framing, sock=connection)
        await loop.create_future()  # never set: the process ends in `_controller_lost` or by a signal


class Worker:
    """Answers the commands of one incarnation. `tasks` owns every answer in progress."""

    def __init__(self, name: str, epoch: int, silence_s_max: float | None, tasks: asyncio.TaskGroup) -> None:
        self.framing = Framing(self._receive, lambda: os._exit(CONTROLLER_LOST))
        self._name, self._epoch, self._silence_s_max = name, epoch, silence_s_max
        self._tasks = tasks
        self._object: Any = None
        self._streams: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]] = {}
        self._message_s = 0.0
        self._vitals, self._calls = VitalSigns(), ExecutedCalls()
        self._noticed = False

    def noticed(self) -> None:
        """The host goes away. An object that is still being made gets the notice when it is ready."""
        self._noticed = True
        notice = getattr(self._object, "notice", None)
        if notice is not None:
            notice()
            asyncio.get_running_loop().call_later(GRACE_S, os._exit, NOTICED)

    # ------------------------------------------------------------ commands

    def _receive(self, kind: Kind, epoch: int, call_id: int, payload: Payload) -> None:
        if epoch != self._epoch:
            message = (
                f"{self._name} (epoch {self._epoch}) got a command for epoch {epoch}; use the newest handle"
            )
            self._send(Kind.ERROR, call_id, StaleEpochError(message))
            return
        self._message_s = asyncio.get_running_loop().time()
        match kind:
            case Kind.STREAM:
                credit = asyncio.Semaphore(0)
                task = self._tasks.create_task(self._answer(kind, call_id, payload, credit))
                self._streams[call_id] = task, credit
                task.add_done_callback(lambda _: self._streams.pop(call_id, None))
            case Kind.CREDIT if call_id in self._streams:
                self._grant(self._streams[call_id][1], payload.value())
            case Kind.CANCEL if call_id in self._streams:
                self._streams.pop(call_id)[0].cancel()
            case Kind.CALL | Kind.CONSTRUCT:
                self._tasks.create_task(self._answer(kind, call_id, payload, None))

    async def _answer(
        self, kind: Kind, call_id: int, payload: Payload, credit: asyncio.Semaphore | None
    ) -> None:
        """Run one command. Its caller gets an answer at every possible end, unless it has closed the
        stream."""
        method = kind.name.lower()
        try:
            method, *rest = payload.value()
            if kind is Kind.CONSTRUCT:
                await self._construct(method, *rest)
                self._send(Kind.RESULT, call_id, None)
            elif credit is None:
                self._send(Kind.RESULT, call_id, await self._call(method, *rest), urgent=method == PING)
            else:
                await self._stream(call_id, credit, method, *rest)
                self._send(Kind.END, call_id, None)
        except (Exception, asyncio.CancelledError) as error:
            if credit is not None and call_id not in self._streams:
                return
            self._send(Kind.ERROR, call_id, crossing(error, where(self._name, self._epoch, method)))

    async def _construct(self, target: str, kwargs: dict[str, Any]) -> None:
        """Make the object in a thread: loading may take minutes, and the loop answers pings meanwhile."""
        self._object = await asyncio.to_thread(lambda: load_class(target)(**kwargs))
        if self._noticed:
            self.noticed()
        if self._silence_s_max is not None:
            self._message_s = asyncio.get_running_loop().time()
            self._watch_silence(self._silence_s_max)

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == PING:
            return self._vitals.take(self._calls.vitals(), receiving=self.framing.receiving)
        return await self._calls.run(self._object, method, args)

    async def _stream(
        self, call_id: int, credit: asyncio.Semaphore, method: str, args: tuple[Any, ...], window: int
    ) -> None:
        items = begin_stream(self._object, method, args)
        self._grant(credit, window)
        async with aclosing(items):
            await credit.acquire()
            async for item in items:
                self._send(Kind.ITEM, call_id, item)
                await credit.acquire()

    # ------------------------------------------------------------ parts

    def _send(self, kind: Kind, call_id: int, value: Any, *, urgent: bool = False) -> None:
        self.framing.send(kind, self._epoch, call_id, value, urgent=urgent)

    @staticmethod
    def _grant(credit: asyncio.Semaphore, num_items: int) -> None:
        for _ in range(num_items):
            credit.release()

    def _watch_silence(self, silence_s_max: float) -> None:
        """End the process after `silence_s_max` without a message.

        The loop reads sockets before it runs timers. So a worker that was busy for longer first reads the
        messages that waited.
        """
        loop = asyncio.get_running_loop()
        left_s = self._message_s + silence_s_max - loop.time()
        if left_s <= 0:
            os._exit(CUT_OFF)
        loop.call_later(left_s, self._watch_silence, silence_s_max)
