"""Connections between simulated workers, and the conditions that delay messages."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millrace.runtime.seam import CREDIT_STEP, STREAM_WINDOW
from millrace_sim.virtual.faults import Faults, Latency

END = object()
"""The last item of every stream."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions for all workers of one runtime (`SimRuntime`)."""

    seed: int
    faults: Faults
    latency: Latency
    isolate: bool

    def copied(self, message: Any) -> Any:
        return pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)) if self.isolate else message


class SimulatedLink:
    """One direction of one connection. Messages stay in order, each with its delay."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self._arrival_s = 0.0
        self._in_flight: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        self._arrival_s = max(self._arrival_s, self._loop.time() + self._delay())
        self._in_flight.append((deliver, args))
        self._loop.call_at(self._arrival_s, self._deliver_next)

    def send_apart(self, extra_s: float, deliver: Callable[..., None], *args: Any) -> None:
        """Send a message outside the order of the others."""
        self._loop.call_later(self._delay() + extra_s, deliver, *args)

    def _deliver_next(self) -> None:
        deliver, args = self._in_flight.popleft()
        deliver(*args)


class Channel:
    """One stream: the items that have arrived, and the number of items that the worker may still send."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.credit = asyncio.Semaphore(STREAM_WINDOW)
        self.task: asyncio.Task[None] | None = None

    def grant(self) -> None:
        for _ in range(CREDIT_STEP):
            self.credit.release()


def resolve(reply: asyncio.Future[Any], result: Any) -> None:
    if not reply.done():
        reply.set_result(result)


def fail(reply: asyncio.Future[Any], error: BaseException) -> None:
    if not reply.done():
        reply.set_exception(error)
