"""A virtual-time event loop: unmodified asyncio code runs as fast as it computes, and repeatably.

`time()` starts at 0 and jumps to the next timer when nothing is ready; it takes exactly the value the
timer was scheduled for. A run is a pure function of the program and the seed. Tasks and futures hash by
sequence number, because sets of them are otherwise ordered by address; tasks are named by that number too.
The cyclic garbage collector runs at fixed points. Timers that are due at the same instant run in a seeded
order, because asyncio leaves their order undefined. There are no selectors, sockets or threads here.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from millrace.core.errors import DeadlineExceeded, MillraceError
from millrace_sim.virtual.waits import Wait, waits

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

COLLECT_EVERY = 1 << 19
"""Callbacks between two runs of the garbage collector."""
SPIN_MAX = 1_000_000
"""Loop iterations at one instant before the run ends with an error."""
CANCELLED_MIN = 128
"""Cancelled timers are removed once there are this many and they are the majority."""


class DeadlockError(MillraceError, RuntimeError):
    """Nothing is ready, no timer is set, and the run is not over. `waiting` names each waiting task and its
    place."""

    def __init__(self, problem: str, waiting: tuple[Wait, ...]) -> None:
        super().__init__("\n".join([problem, *(f"  - {wait}" for wait in waiting)]))
        self.problem, self.waiting = problem, waiting


class _Future(asyncio.Future[Any]):
    def __init__(self, sequence: int, loop: VirtualLoop) -> None:
        super().__init__(loop=loop)
        self.sequence = sequence

    def __hash__(self) -> int:
        return self.sequence


class _Task(asyncio.Task[Any]):
    def __init__(self, sequence: int, coro: Any, **options: Any) -> None:
        self.sequence = sequence  # before the task registers itself in a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.sequence


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose clock is a variable.

    Raises from `run_until_complete`: DeadlockError; DeadlineExceeded past `time_max_s`.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, seed: int, *, time_max_s: float) -> None:
        super().__init__()
        self.seed = seed
        self.unhandled: list[BaseException] = []
        self.num_callbacks = 0
        self._now = 0.0
        self._time_max_s = time_max_s
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._num_cancelled = 0
        self._sequence = 0
        self._spins = 0
        self._collect_at = COLLECT_EVERY
        self._tie_break = random.Random(seed).random
        self.set_exception_handler(_keep_exception)

    # -------------------------------------------------------- time

    def time(self) -> float:
        return self._now

    def wall(self) -> float:
        """The wall time under simulation, for `core.clock.wall`."""
        return self._now

    def jump(self, seconds: float) -> None:
        """The clock jumps ahead. Timers that the jump passes are late, and run in order."""
        self._now += seconds

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, self._tie_break(), self.next_sequence(), timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if not handle._scheduled:  # type: ignore[attr-defined]
            return
        self._num_cancelled += 1
        if self._num_cancelled >= CANCELLED_MIN and 2 * self._num_cancelled > len(self._timers):
            # `cancel` marks the handle only after this call, so it stays until the next removal.
            self._timers = [entry for entry in self._timers if not entry[3].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled = 1

    # -------------------------------------------------------- identity

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self.next_sequence(), self)

    def create_task(self, coro: Any, *, name: object = None, **options: Any) -> asyncio.Task[Any]:
        sequence = self.next_sequence()
        return _Task(sequence, coro, loop=self, name=str(name or f"task-{sequence}"), **options)

    # -------------------------------------------------------- running

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        self._release_due()
        count = len(ready)
        for _ in range(count):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        self.num_callbacks += count
        self._spins += 1
        if self._spins > SPIN_MAX:
            self._stuck(
                f"{SPIN_MAX} iterations at virtual time {self._now} s: something polls without sleeping"
            )
        if self.num_callbacks >= self._collect_at:
            self._collect_at += COLLECT_EVERY
            gc.collect()

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][3].cancelled():
            heapq.heappop(timers)
            self._num_cancelled -= 1
        if not timers:
            self._stuck(f"deadlock at virtual time {self._now} s: nothing is ready and no timer is set")
        when = timers[0][0]
        if when > self._time_max_s:
            listing = "\n".join(f"  - {wait}" for wait in self._waits())
            raise DeadlineExceeded(f"virtual time passed its limit of {self._time_max_s} s\n{listing}")
        if when > self._now:
            self._now = when
            self._spins = 0

    def _release_due(self) -> None:
        timers, now, ready = self._timers, self._now, self._ready
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[3]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer.cancelled():
                self._num_cancelled -= 1
            else:
                ready.append(timer)

    def _stuck(self, problem: str) -> NoReturn:
        raise DeadlockError(problem, self._waits())

    def _waits(self) -> tuple[Wait, ...]:
        return waits(sorted(asyncio.all_tasks(self), key=hash))

    # -------------------------------------------------------- not simulated

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> NoReturn:
        raise MillraceError(f"{func!r} asks for a thread: threads are not simulated")

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...


def _keep_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    if "exception" in context:
        loop.unhandled.append(context["exception"])


_kept = 0  # blocks of memory that the last collection between two runs left


def _freeze_objects() -> None:
    """Hide the objects that exist from the collector. Garbage of earlier runs is collected first, once it may
    be a fifth of the memory: the collector never examines hidden objects again. Counting these objects takes
    as long as a short run; counting blocks takes no time."""
    global _kept
    gc.freeze()
    if sys.getallocatedblocks() > 1.25 * _kept:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _kept = sys.getallocatedblocks()


@contextmanager
def _collector_at_fixed_points() -> Iterator[None]:
    """The collector may finalize async generators, which schedules callbacks: pin when it runs."""
    enabled = gc.isenabled()
    gc.disable()
    _freeze_objects()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def run(main: Coroutine[Any, Any, T], *, seed: int, time_max_s: float = float("inf")) -> T:
    """Run `main` to its end under virtual time and return its result.

    Raises: what `main` raised; DeadlockError; DeadlineExceeded past `time_max_s` (virtual seconds);
    the first exception that nobody handled, of a callback or of a task nobody awaited.
    """
    loop = VirtualLoop(seed, time_max_s=time_max_s)
    with _collector_at_fixed_points(), asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main)
    if loop.unhandled:
        raise loop.unhandled[0]
    return result
