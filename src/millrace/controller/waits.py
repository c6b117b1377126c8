"""Who waits for what: the record that tells a stalled run from a busy one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count

from millrace.core import clock


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
