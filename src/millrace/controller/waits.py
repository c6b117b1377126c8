"""Who waits for what: the record that tells a stalled run from a busy one, and answers that a worker owes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count

from millrace.core import clock
from millrace.core.pulse import Pulse
from millrace.core.types import ScoreRequest


class Waits:
    """Who waits for what, since when; and when the run last made progress."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, str, float]] = {}  # who waits for what, since when
        self._bounded: set[int] = set()  # open waits that have their own deadline
        self._numbers = count()
        self._tried: set[tuple[str, str]] = set()  # waits with a deadline since the last progress
        self._prepared: set[tuple[str, str]] = set()  # (worker, what) since the last progress
        self._fruitful: set[str] = set()
        self.progressed_s = 0.0

    def waiting(self, who: str, what: str, *, bounded: bool = False) -> AbstractContextManager[None]:
        """`bounded`: this wait has its own deadline. While it is open the run is not stalled, unless the same
        wait was bounded before and no progress was made since."""
        return _Wait(self, self.open(who, what, bounded=bounded))

    def open(self, who: str, what: str, *, bounded: bool = False) -> int:
        """As `waiting`. `end` gets the number."""
        number = next(self._numbers)  # one worker may wait for several things
        self._open[number] = who, what, clock.now()
        if bounded and (who, what) not in self._tried:
            self._tried.add((who, what))
            self._bounded.add(number)
        return number

    def end(self, number: int) -> None:
        del self._open[number]
        self._bounded.discard(number)

    @property
    def bounded(self) -> bool:
        """Whether an open wait has its own deadline."""
        return bool(self._bounded)

    def progress(self, *workers: str) -> None:
        """The run made progress; `workers` can do a part of it."""
        self.progressed_s = clock.now()
        self._tried.clear()
        self._prepared.clear()
        self._fruitful.update(workers)

    def prepared(self, worker: str, what: str) -> None:
        """`worker` has `what`, and can work. It counts once between two times of real progress: a worker that
        is prepared again and again without work is a stall."""
        if (worker, what) not in self._prepared:
            self._prepared.add((worker, what))
            self.progressed_s = clock.now()

    def fruitful(self, worker: str) -> bool:
        """Whether any incarnation of `worker` has done a part of the run's work."""
        return worker in self._fruitful

    def discount(self, seconds: float) -> None:
        """Seconds in which no progress was possible do not count as quiet."""
        self.progressed_s += seconds

    def describe(self) -> list[str]:
        """One line per wait, the longest first."""
        now = clock.now()
        waits = sorted(self._open.values(), key=lambda wait: wait[2])
        return [f"{who} waits for {what} ({now - since:.1f} s)" for who, what, since in waits]


class _Wait(AbstractContextManager[None]):
    """An open wait. A generator with `contextmanager` takes three times as long."""

    __slots__ = ("_number", "_waits")

    def __init__(self, waits: Waits, number: int) -> None:
        self._waits, self._number = waits, number

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._waits.end(self._number)


class OpenCalls:
    """The answers that a worker with several lanes owes, the oldest call first. All have the same time, so
    the oldest is the next that is late. A call is no task: its answer comes to a function.
    `hold` takes tasks, which have deadlines of their own."""

    def __init__(self, worker: str, waits: Waits, most_s: float) -> None:
        self._worker, self._waits, self._most_s = worker, waits, most_s
        self._open: dict[int, tuple[ScoreRequest, float]] = {}  # by number: when it began
        self._tasks = set[asyncio.Task[None]]()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = False  # later answers count no more
        self.ended = Pulse()

    def __bool__(self) -> bool:
        return bool(self._open or self._tasks)

    @property
    def over(self) -> bool:
        """A call has failed, or the session is over: no other call begins."""
        return self._failed.done()

    def open(self, request: ScoreRequest) -> int:
        """The number of the call."""
        what = f"the answer to trajectory {request.trajectory_id}"
        number = self._waits.open(self._worker, what, bounded=True)
        self._open[number] = request, clock.now()
        return number

    def end(self, number: int) -> float:
        """When the call began."""
        self._waits.end(number)
        _, began_s = self._open.pop(number)
        return began_s

    def hold(self, task: asyncio.Task[None]) -> None:
        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or task.exception():  # its group ends
                self.close()
            self.ended.fire()

        self._tasks.add(task)
        task.add_done_callback(end)

    def fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def close(self) -> None:
        self.closed = True
        self._failed.cancel()
        for number in [*self._open]:
            self.end(number)

    async def watch(self, late: Callable[[ScoreRequest], BaseException]) -> None:
        """Raises: the error of a call that has failed, or what `late` makes of one that takes too long."""
        while not self.over:
            oldest = next(iter(self._open.values()), None)
            left_s = self._most_s if oldest is None else oldest[1] + self._most_s - clock.now()
            if oldest is not None and left_s <= 0:
                self.close()
                raise late(oldest[0])
            await asyncio.wait([self._failed], timeout=left_s)
        self._failed.result()
