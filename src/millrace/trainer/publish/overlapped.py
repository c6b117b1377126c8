"""Work that reads a trainer's weights during its next step."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Generic, TypeVar

from millrace.core.progress import CallProgress, of, waiting_for
from millrace.trainer.ranks.mesh import ALONE, Ranks

T = TypeVar("T")


class Overlapped(Generic[T]):
    """One work at a time, in a thread, with a group of `ranks` for this work alone.

    Nothing changes the weights until the next update. So only an update that comes before `release` waits:
    the owner calls `wait_read` before each update. `call`: the method of the trainer that waits for the end
    of the work.
    """

    def __init__(self, call: str, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks.in_own_group()
        self._thread, self._progress = ThreadPoolExecutor(1, call), CallProgress(call)
        self._work: Future[T] | None = None
        self._read = Event()
        self._read.set()
        self._waits_since_s: float | None = None
        self._stall_s = 0.0

    def begin(self, work: Callable[[], T], began_s: float) -> None:
        """Begin `work` after the end of the work before. `began_s`: the time from which on the trainer waits,
        by `time.perf_counter`."""
        self.wait()
        self._read.clear()
        self._waits_since_s, self._stall_s = None, time.perf_counter() - began_s
        self._work = self._thread.submit(self._do, work)

    def release(self) -> float:
        """The work calls this when it reads no more weights. Returns how long the trainer has waited for
        it."""
        if not self._read.is_set() and self._waits_since_s is not None:
            self._stall_s += time.perf_counter() - self._waits_since_s
        self._read.set()
        return self._stall_s

    def wait(self) -> bool:
        """Wait until no work is running. Returns whether there was work and it did not fail."""
        with waiting_for(self._progress):
            return self._work is not None and self._work.exception() is None

    def result(self) -> T:
        """Wait for the result of the last work. Raises the work's error."""
        assert self._work is not None, "nothing was begun"
        with waiting_for(self._progress):
            return self._work.result()

    def _do(self, work: Callable[[], T]) -> T:
        try:
            with of(self._progress):
                return work()
        finally:
            self.release()

    def wait_read(self) -> None:
        """Wait until the work reads no more weights."""
        self._waits_since_s = time.perf_counter()
        with waiting_for(self._progress):
            self._read.wait()
