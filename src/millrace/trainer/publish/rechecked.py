"""The digest of published weights, taken once more before they are trained on or saved: torch and JAX."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from millrace.core.digest import NamedBlock, kind_of, version_digest
from millrace.core.errors import DigestMismatchError
from millrace.core.types import Endpoint, Published
from millrace.trainer.publish.overlapped import Overlapped
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed

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
