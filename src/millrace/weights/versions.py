"""What a relay has of versions, and may send to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from millrace.core.digest import TensorSpec
from millrace.core.errors import WeightsError
from millrace.core.pulse import Pulse
from millrace.weights.chain.holding import Holding, arriving, written
from millrace.weights.layout import Memory


class Versions:
    """What is in a relay's slots, and the one version that is arriving in a slot of its own (a
    `sending.Shelf`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.news = memory, Pulse()
        self._written: dict[tuple[int, int], Holding] = {}  # by slot and sequence
        self._arriving: Holding | None = None

    def find(self, version: int, digest: str) -> Holding | None:
        """Whole, written in part by the ranks of this host, or arriving."""
        here = [*self._all_written(), *filter(None, [self._arriving])]
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
        holding = self.find(version, digest)
        if holding is None:
            if self._arriving is not None:
                self._arriving.end(f"version {version} took its place")
            holding = self._arriving = arriving(self._memory, version, manifest)
        holding.ended = ""
        self.news.fire()
        return holding

    def ended(self, version: int, digest: str, why: str) -> None:
        """What lacks of a version will not arrive for now."""
        if (holding := self.find(version, digest)) is not None:
            holding.end(why)

    def _all_written(self) -> list[Holding]:
        memory, known, kept = self._memory, self._written, dict[tuple[int, int], Holding]()
        if self._arriving is not None:
            known[self._arriving.slot, self._arriving.sequence] = self._arriving
        for slot in range(memory.slots):
            place = slot, memory.sequence(slot)
            if memory.written(slot):
                with suppress(WeightsError):  # overwritten in this moment
                    kept[place] = known.get(place) or written(memory, *place)
        self._written = kept
        return list(kept.values())

    def _all_whole(self) -> list[Holding]:
        return [one for one in self._all_written() if self._memory.complete(one.slot)]
