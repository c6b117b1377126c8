"""How far a worker's calls are: the difference between a call that takes long and a call that is stuck.

A worker begins a `CallProgress` for each call. Everything that works for the call counts what it has done:
bytes received, tensors loaded, rows trained. Heartbeats carry the counts to the controller. No deadline of
the controller runs while a count grows.

    progress.count(len(data))                 what runs in a call, or in a thread with the call's context
    progress.current().activity = "..."       what takes long without a count, in words; "" at its end
    with progress.waiting_for(other): ...     this call waits for other work, and is as far as that work

The context of a call reaches its tasks and `asyncio.to_thread`. Other threads enter it with `progress.of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec


class CallVitals(msgspec.Struct, frozen=True):
    """How far a call is that a worker executes. `done`: a count of what was done for it, in any unit.
    `waits_for`: the method of another call of this worker that it waits for; empty: it waits for none.
    `activity`: what it does now and cannot count, for people."""

    method: str
    done: int = 0
    waits_for: str = ""
    activity: str = ""


class Vitals(msgspec.Struct, frozen=True):
    """The state of a worker's process, in its answer to a heartbeat."""

    cpu_s: float  # used since the process started
    resident_bytes: int
    disk: bool  # the process waits for a disk, or has read from a disk since the last heartbeat
    calls: list[CallVitals]  # that are being executed, without streams
    receiving: bool = False  # a large command is arriving and is not complete
    queued_s: float = 0.0  # for which its threads waited for a core; 0 where the kernel does not tell


class CallProgress:
    """Of one call, named after its method; or of work without a name that calls wait for."""

    def __init__(self, name: str = "") -> None:
        self.name, self.activity, self._done = name, "", 0
        self._awaited: CallProgress | None = None

    def count(self, amount: int = 1) -> None:
        """Several threads may count. A lost update does no harm: the count still changes."""
        self._done += amount

    def vitals(self) -> CallVitals:
        """The counts of the awaited work are part of this call's count. The last named work that the call
        waits for is the call that has to answer for it."""
        awaited = None if self._awaited is None else self._awaited.vitals()
        if awaited is None:
            return CallVitals(self.name, self._done, activity=self.activity)
        waits_for = awaited.waits_for or awaited.method
        return CallVitals(self.name, self._done + awaited.done, waits_for, self.activity or awaited.activity)

    @contextmanager
    def waiting_for(self, other: CallProgress) -> Iterator[None]:
        """`other` does not wait for this, directly or not."""
        before, self._awaited = self._awaited, other
        try:
            yield
        finally:
            self._awaited = before


_CURRENT: ContextVar[CallProgress | None] = ContextVar("progress", default=None)


def current() -> CallProgress:
    """Of the call that the running code works for. Outside of calls nobody sees it."""
    return _CURRENT.get() or CallProgress()


def count(amount: int = 1) -> None:
    """The call that the running code works for has done so much more."""
    current().count(amount)


@contextmanager
def of(progress: CallProgress) -> Iterator[CallProgress]:
    """The block works for `progress`."""
    token = _CURRENT.set(progress)
    try:
        yield progress
    finally:
        _CURRENT.reset(token)


@contextmanager
def waiting_for(other: CallProgress) -> Iterator[None]:
    """The call that the running code works for waits for `other`."""
    with current().waiting_for(other):
        yield
