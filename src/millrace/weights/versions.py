"""The versions of a relay that the relay may send to other relays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from millrace.core.digest import TensorSpec
from millrace.core.errors import WeightsError
from millrace.core.pulse import Pulse
from millrace.weights.chain.holding import ChunkedVersion, arriving, written
from millrace.weights.layout import Memory


class Versions:
    """The versions in a relay's slots, and at most one version that arrives (a `sending.VersionSource`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.news = memory, Pulse()
        self._written: dict[tuple[int, int], ChunkedVersion] = {}  # by slot and sequence
        self._arriving: ChunkedVersion | None = None

    def find(self, version: int, digest: str) -> ChunkedVersion | None:
        """The version: complete, written in part by the ranks of this host, or arriving."""
        for chunked in [*self._all_written(), *filter(None, [self._arriving])]:
            if (chunked.version, chunked.digest) == (version, digest) and chunked.intact:
                return chunked
        return None

    def present(self) -> list[tuple[int, str]]:
        """Complete versions: (version, published digest)."""
        return [(chunked.version, chunked.digest) for chunked in self._all_complete()]

    def base(self, versions: Iterable[tuple[int, str]], like: ChunkedVersion) -> ChunkedVersion | None:
        """The newest of `versions` that is complete here and has the chunks of `like`."""
        keys = set(map(tuple, versions))
        bases = (base for base in self._all_complete() if (base.version, base.digest) in keys)
        return max(
            (base for base in bases if base is not like and base.same_layout(like)),
            key=lambda base: base.version,
            default=None,
        )

    def begin(self, version: int, manifest: Sequence[TensorSpec], digest: str) -> ChunkedVersion:
        """The slot of a version that is to arrive, new or with chunks of the version. Raises WeightsError."""
        chunked = self.find(version, digest)
        if chunked is None:
            if self._arriving is not None:
                self._arriving.end(f"version {version} took its place")
            chunked = self._arriving = arriving(self._memory, version, manifest)
        chunked.begin()
        self.news.fire()
        return chunked

    def ended(self, version: int, digest: str, reason: str) -> None:
        """The missing chunks of a version will not arrive for now."""
        if (chunked := self.find(version, digest)) is not None:
            chunked.end(reason)

    def _all_written(self) -> list[ChunkedVersion]:
        memory, former, present = self._memory, self._written, dict[tuple[int, int], ChunkedVersion]()
        if self._arriving is not None:
            former[self._arriving.slot, self._arriving.sequence] = self._arriving
        for slot in range(memory.slots):
            place = slot, memory.sequence(slot)
            if memory.written(slot):
                with suppress(WeightsError):  # overwritten at this moment
                    present[place] = former.get(place) or written(memory, *place)
        self._written = present
        return list(present.values())

    def _all_complete(self) -> list[ChunkedVersion]:
        return [chunked for chunked in self._all_written() if self._memory.complete(chunked.slot)]
