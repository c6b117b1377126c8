"""How long a command may take: as long as its worker makes progress with it.

A worker whose process answers heartbeats can still be stuck in one call: on a lock, or on a peer that is
gone. One of three signs ends the worker. Only the first sign needs an earlier call of the same method:

- the call takes ten times longer than any earlier call of its method;
- for 20 s the process has neither computed nor waited for a disk;
- the worker does not know of the call: the request or its answer is lost.

After a wrong judgement the next call of that method has the full limit, so the mistake costs one restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millrace.core import clock
from millrace.core.errors import DeadlineExceeded
from millrace.core.protocols import Handle
from millrace.core.types import Vitals

FACTOR = 10.0
FLOOR_S = 20.0  # no call ends its worker sooner: a loaded machine is sometimes slow
CPU_SHARE = 0.02  # of one core; answering heartbeats and reporting takes a tenth of that
CREDIT_S_MAX = FLOOR_S / 2  # between two heartbeats; a longer time means that the controller was stopped
LOST_S = 15.0  # of heartbeats that do not name a call: a heartbeat may precede the call, or its answer


@dataclass(slots=True)
class _Call:
    method: str
    started_s: float
    idle_s: float = 0.0  # for which its process has done nothing
    unknown_s: float = 0.0  # for which heartbeats have not named it


@dataclass(slots=True)
class _Incarnation:
    epoch: int
    heartbeat_s: float  # when it last answered
    cpu_s: float = 0.0
    calls: list[_Call] = field(default_factory=list)


class Patience:
    """For the calls of all workers of one run. `limit_s` bounds every call."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._longest_s: dict[str, float] = {}
        self._incarnations: dict[str, _Incarnation] = {}

    def deadline_s(self, method: str) -> float:
        longest_s = self._longest_s.get(method)
        if longest_s is None:
            return self._limit_s
        return min(self._limit_s, max(FLOOR_S, FACTOR * longest_s))

    async def call(
        self, handle: Handle, method: str, *args: Any, waits: bool = False, also_s: float = 0.0
    ) -> Any:
        """`handle.call` with the deadline of `method`. `waits`: the call may wait for other work of its
        worker. So it has the full limit, and its time is no measure for later calls. `also_s`: the deadline
        of other work that the call usually waits for.

        Raises: as `handle.call`.
        """
        calls, call = self._incarnation(handle).calls, _Call(method, clock.now())
        calls.append(call)
        timeout_s = self._limit_s if waits else min(self._limit_s, self.deadline_s(method) + also_s)
        try:
            answer = await handle.call(method, *args, timeout_s=timeout_s)
        except DeadlineExceeded:
            self._longest_s.pop(method, None)
            raise
        finally:
            calls.remove(call)
        if not waits:
            self._longest_s[method] = max(self._longest_s.get(method, 0.0), clock.now() - call.started_s)
        return answer

    def on_heartbeat(self, handle: Handle, vitals: Vitals, sent_s: float) -> None:
        """The worker answered the heartbeat of `sent_s`. Raises: DeadlineExceeded: a call is stuck."""
        worker, now_s = self._incarnation(handle), clock.now()
        elapsed_s, used_s = now_s - worker.heartbeat_s, vitals.cpu_s - worker.cpu_s
        worker.heartbeat_s, worker.cpu_s = now_s, vitals.cpu_s
        idle = not vitals.disk and used_s < CPU_SHARE * elapsed_s
        for call in worker.calls:
            if call.started_s >= sent_s:
                continue
            waited_s = now_s - call.started_s
            credit_s = min(elapsed_s, waited_s, CREDIT_S_MAX)
            call.idle_s = call.idle_s + credit_s if idle else 0.0
            is_known = call.method in vitals.calls or vitals.receiving
            call.unknown_s = 0.0 if is_known else call.unknown_s + credit_s
            what = f"{handle.name} (epoch {handle.epoch}): {call.method} was asked for {waited_s:.0f} s ago"
            if call.unknown_s >= LOST_S:
                raise DeadlineExceeded(f"{what}, and the worker knows nothing of it")
            if call.idle_s >= FLOOR_S:
                raise DeadlineExceeded(
                    f"{what}, and for {call.idle_s:.0f} s its process has neither computed nor waited for a "
                    "disk: it is stuck, on a lock or a peer that is gone"
                )

    def _incarnation(self, handle: Handle) -> _Incarnation:
        incarnation = self._incarnations.get(handle.name)
        if incarnation is None or incarnation.epoch != handle.epoch:
            incarnation = self._incarnations[handle.name] = _Incarnation(handle.epoch, clock.now())
        return incarnation
