"""How long a command may take: as long as its worker makes progress with it.

A worker whose process answers heartbeats can still be stuck in one call: on a lock, or on a peer that is
gone. Each heartbeat says how far the calls of the worker are (`core.progress`). A call works if one of five
things is true, each with a limit of its own:

- its count grows: no limit, however long the call takes;
- it waits for another call of the same worker: as long as that call works;
- the process computes or waits for a disk, without a count: ten times the longest such time of any earlier
  call of its method, and at most `limit_s`;
- its worker names what it does and cannot count (it compiles): `limit_s`, and the deadline names it, too;
- other programs leave the process no core, though its threads wait for one: the same, and the time of this
  wait comes on top, up to `limit_s`.

A call that does not work ends the worker after `FLOOR_S`, and a call that its worker does not know after
`LOST_S`. After a wrong judgement the next call of that method has the full limit, so the mistake costs one
restart.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from millrace.core import clock
from millrace.core.errors import DeadlineExceeded
from millrace.core.progress import CallVitals, Vitals
from millrace.core.protocols import Handle

FACTOR = 10.0
FLOOR_S = 20.0  # no call ends its worker sooner: a loaded machine is sometimes slow
CPU_SHARE = 0.02  # of one core; answering heartbeats and reporting takes a tenth of that
QUEUE_SHARE = 0.5  # of one core; a thread with work waits all the time, one that answers heartbeats far less
CREDIT_S_MAX = FLOOR_S / 2  # between two heartbeats; a longer time means that the controller was stopped
LOST_S = 15.0  # of heartbeats that do not name a call: a heartbeat may precede the call, or its answer


@dataclass(slots=True)
class _Call:
    method: str
    limit_s: float  # without a count
    limit: asyncio.Timeout
    started_s: float
    counted_s: float  # when its count grew last
    uncounted_s: float = 0.0  # the longest time between two counts so far
    done: int = 0
    activity: str = ""  # what its worker says that it does
    active_s: float = 0.0  # since when
    idle_s: float = 0.0  # for which its process has done nothing
    unknown_s: float = 0.0  # for which heartbeats have not named it

    def longest_s(self, now_s: float) -> float:
        """Without a count."""
        return max(self.uncounted_s, now_s - self.counted_s)

    def count(self, now_s: float, done: int) -> None:
        """Its limit begins anew."""
        self.uncounted_s, self.counted_s, self.done = self.longest_s(now_s), now_s, done
        self._reschedule()

    def in_words(self, now_s: float) -> str:
        """What it does, and for how long, behind a comma; empty: its worker says nothing."""
        return f", {self.activity} for {now_s - self.active_s:.0f} s" if self.activity else ""

    def extend(self, by_s: float, limit_s_max: float) -> None:
        """Its process got no core for so long, or does what it cannot count."""
        self.limit_s = min(self.limit_s + by_s, limit_s_max)
        self._reschedule()

    def _reschedule(self) -> None:
        if not self.limit.expired():
            self.limit.reschedule(self.counted_s + self.limit_s)


@dataclass(slots=True)
class _Incarnation:
    epoch: int
    heartbeat_s: float  # when it last answered
    cpu_s: float = 0.0
    queued_s: float = 0.0
    calls: list[_Call] = field(default_factory=list)


class Patience:
    """For the calls of all workers of one run. `limit_s` bounds the time of a call without a count."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._longest_s: dict[str, float] = {}  # without a count, by method
        self._incarnations: dict[str, _Incarnation] = {}

    def _limit_of(self, method: str) -> float:
        longest_s = self._longest_s.get(method)
        if longest_s is None:
            return self._limit_s
        return min(self._limit_s, max(FLOOR_S, FACTOR * longest_s))

    async def call(self, handle: Handle, method: str, *args: Any) -> Any:
        """`handle.call`, for as long as the worker makes progress with it.

        Raises: as `handle.call`.
        """
        limit_s, calls = self._limit_of(method), self._incarnation(handle).calls
        try:
            async with asyncio.timeout(limit_s) as limit:
                call = _Call(method, limit_s, limit, clock.now(), clock.now())
                calls.append(call)
                try:
                    answer = await handle.call(method, *args, timeout_s=math.inf)
                finally:
                    calls.remove(call)
        except TimeoutError as error:
            self._longest_s.pop(method, None)
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"{handle.name} (epoch {handle.epoch}): {method} did not answer, and counted no progress for "
                f"{call.limit_s:.0f} s{call.in_words(clock.now())}"
            ) from None
        longest_s = call.longest_s(clock.now())
        self._longest_s[method] = max(self._longest_s.get(method, 0.0), longest_s)
        return answer

    def on_heartbeat(self, handle: Handle, vitals: Vitals, sent_s: float) -> None:
        """The worker answered the heartbeat of `sent_s`. Raises: DeadlineExceeded: a call is stuck."""
        worker, now_s = self._incarnation(handle), clock.now()
        elapsed_s, used_s = now_s - worker.heartbeat_s, vitals.cpu_s - worker.cpu_s
        queued_s = vitals.queued_s - worker.queued_s
        worker.heartbeat_s, worker.cpu_s, worker.queued_s = now_s, vitals.cpu_s, vitals.queued_s
        computes = used_s >= CPU_SHARE * elapsed_s
        starved = not computes and queued_s >= QUEUE_SHARE * elapsed_s
        idle = not (computes or starved or vitals.disk)
        executed, open_methods = _by_method(vitals.calls), {call.method for call in worker.calls}
        for call in worker.calls:
            if call.started_s >= sent_s:
                continue
            state = executed.get(call.method, CallVitals(call.method))
            counts = state.done != call.done or state.waits_for in open_methods - {call.method}
            if counts:
                call.count(now_s, state.done)
            if state.activity != call.activity:
                call.activity, call.active_s = state.activity, now_s
            credit_s = min(elapsed_s, now_s - call.started_s, CREDIT_S_MAX)
            if state.activity or (starved and not counts):
                call.extend(self._limit_s if state.activity else credit_s, self._limit_s)
            call.idle_s = call.idle_s + credit_s if idle and not counts else 0.0
            is_known = call.method in executed or vitals.receiving
            call.unknown_s = 0.0 if is_known else call.unknown_s + credit_s
            self._refuse_stuck(handle, call, now_s)

    def activities(self) -> list[str]:
        """What workers say that they do in a call, a line each."""
        calls = ((name, call) for name, each in self._incarnations.items() for call in each.calls)
        return [name + words for name, call in calls if (words := call.in_words(clock.now()))]

    def _refuse_stuck(self, handle: Handle, call: _Call, now_s: float) -> None:
        what = (
            f"{handle.name} (epoch {handle.epoch}): {call.method} was asked for "
            f"{now_s - call.started_s:.0f} s ago{call.in_words(now_s)}"
        )
        if call.unknown_s >= LOST_S:
            raise DeadlineExceeded(f"{what}, and the worker knows nothing of it")
        if call.idle_s >= FLOOR_S:
            raise DeadlineExceeded(
                f"{what}, and for {call.idle_s:.0f} s it counted no progress, and its process has neither "
                "computed nor waited for a core or a disk: it is stuck, on a lock or a peer that is gone"
            )

    def _incarnation(self, handle: Handle) -> _Incarnation:
        incarnation = self._incarnations.get(handle.name)
        if incarnation is None or incarnation.epoch != handle.epoch:
            incarnation = self._incarnations[handle.name] = _Incarnation(handle.epoch, clock.now())
        return incarnation


def _by_method(calls: Iterable[CallVitals]) -> dict[str, CallVitals]:
    """The calls of one method as one: on several ranks, or one after another."""
    by_method = dict[str, CallVitals]()
    for call in calls:
        other = by_method.get(call.method, CallVitals(call.method))
        waits_for = other.waits_for or call.waits_for
        activity = other.activity or call.activity
        by_method[call.method] = CallVitals(call.method, other.done + call.done, waits_for, activity)
    return by_method
