"""The digest of published weights, taken once more before they are trained on or saved: torch and JAX. The
work overlaps with the trainer's next step.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Generic, TypeVar

from millrace.core.digest import NamedBlock, kind_of, version_digest
from millrace.core.errors import DigestMismatchError
from millrace.core.progress import CallProgress, of, waiting_for
from millrace.core.types import Endpoint, Published
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed

T = TypeVar("T")


RECHECK_SHARE = 0.01
"""The share of the time from update to update that digests before updates may take."""


class RecheckedPublisher(ABC):
    """What the publishers of both trainers share. A weight that changed in memory since it was published is
    not trained on, and not saved.

    If the second digest takes more than 1 % of the time, it comes only before every n-th update. The owner
    calls `before_update` before each update, and `refuse_changed` before a checkpoint.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._overlapped = Overlapped[Published]("await_published", ranks)
        self._begun: tuple[Endpoint, int] | None = None
        self._published_digest = ""  # of the blocks that this rank published last; empty: it has no block
        self._fresh = False  # no update since a version was begun
        self._updates, self._recheck_at, self._checked_s = 0, 1, time.perf_counter()

    @abstractmethod
    def _current_digest(self) -> str:
        """The digest of this rank's blocks of the current weights."""

    def result(self) -> Published:
        """Wait until the version that was begun last is whole in its slot.

        Raises: WeightsError, or any other error that stopped the version, on this rank or another.
        """
        return self._overlapped.result()

    def wait(self) -> None:
        """Wait until no version is being published. An error is not raised here."""
        self._overlapped.wait()

    def before_update(self) -> None:
        """Wait until no weights are read, and recheck before every n-th update. Every rank makes this call
        equally often, and decides n alike, by the measurements of all ranks."""
        self._overlapped.wait_read()
        if not self._fresh:
            return
        self._fresh, self._updates = False, self._updates + 1
        if self._updates < self._recheck_at:
            return
        took_s, step_s = zip(*agreed(self._ranks, self._recheck), strict=True)
        self._updates, self._recheck_at = 0, max(1, math.ceil(max(took_s) / (RECHECK_SHARE * min(step_s))))

    def refuse_changed(self, version: int) -> None:
        """Raises: DigestMismatchError: the weights changed since they were published as `version`."""
        if not self._overlapped.wait() or self.result().version != version:
            return
        digest = self._current_digest()
        if self._published_digest and digest != self._published_digest:
            raise DigestMismatchError(
                f"the trainer's weights of version {version} changed in memory: published with digest "
                f"{self._published_digest}, they have {digest} now.\n"
                "  They are not trained on and not saved: test the memory, then `--resume`"
            )

    def _recheck(self) -> tuple[float, float]:
        """Seconds of the recheck, and seconds from update to update. Raises: as `refuse_changed`."""
        self._overlapped.wait()
        assert self._begun is not None
        began_s = time.perf_counter()
        self.refuse_changed(self._begun[1])
        step_s, self._checked_s = (began_s - self._checked_s) / self._updates, began_s
        return time.perf_counter() - began_s, step_s


def digest_of(blocks: Sequence[NamedBlock], dtype: str) -> str:
    """One digest of a rank's blocks; empty: it has none."""
    if not blocks:
        return ""
    entries = ((name, dtype, block.shape, block.digest) for name, block in blocks)
    return version_digest(entries, kind_of(blocks[0][1].digest))


# ---------------------------------------------------------------- work during the next step


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
