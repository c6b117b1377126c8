"""What a relay has of versions, and may send to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from millrace.core.digest import TensorSpec
from millrace.core.errors import WeightsError
from millrace.core.pulse import Pulse
from millrace.weights.holding import Holding, arriving, staged
from millrace.weights.layout import Memory


class Versions:
    """What is whole in a relay's slots, and the one version that is arriving (a `sending.Shelf`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.news = memory, Pulse()
        self._whole: dict[tuple[int, int], Holding] = {}  # by slot and sequence
        self._arriving: Holding | None = None

    def find(self, version: int, digest: str) -> Holding | None:
        """Whole, or arriving."""
        here = [*self._all_whole(), *filter(None, [self._arriving])]
        fits = (one for one in here if (one.version, one.digest) == (version, digest) and one.intact)
        return next(fits, None)

    def present(self) -> list[tuple[int, str]]:
        """Whole ones: (version, published digest)."""
        return [(holding.version, holding.digest) for holding in self._all_whole()]

    def base(self, held: Iterable[tuple[int, str]], like: Holding) -> Holding | None:
        """The newest whole version of `held` whose chunks are those of `like`."""
        found = set(map(tuple, held))
        fits = (one for one in self._all_whole() if (one.version, one.digest) in found)
        return max(
            (one for one in fits if one is not like and one.as_laid_out(like)),
            key=lambda one: one.version,
            default=None,
        )

    def begin(self, version: int, manifest: Sequence[TensorSpec], digest: str) -> Holding:
        """A place for a version that is to arrive, or the one where some of it is. Raises WeightsError."""
        holding = self._arriving
        if holding is None or (holding.version, holding.digest) != (version, digest) or not holding.intact:
            if holding is not None:
                holding.end(f"version {version} took its place")
            holding = self._arriving = arriving(self._memory, version, manifest)
        holding.ended = ""
        self.news.fire()
        return holding

    def ended(self, why: str) -> None:
        """What is arriving will not go on for now."""
        if self._arriving is not None:
            self._arriving.end(why)

    def _all_whole(self) -> list[Holding]:
        memory, kept = self._memory, {}
        for slot in range(memory.slots):
            place = slot, memory.sequence(slot)
            if memory.complete(slot):
                with suppress(WeightsError):  # overwritten in this moment
                    kept[place] = self._whole.get(place) or staged(memory, *place)
        self._whole = kept
        return list(kept.values())
