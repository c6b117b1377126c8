"""The chain that versions go down, from relay to relay: which relay fetches which version from where. Pure.

The root relays are those of the trainer's hosts. The trainer writes into them. Every other relay gets the
newest version from the relay before it, which forwards while it receives. If the relay before it does not
answer, a relay asks the earlier relays. The chain leaves out a relay that is down. The last source is the
directory of weights, if the run has one: the directory outlives every relay.

A root relay fetches nothing: the trainer writes its current version into a new root relay.

A trainer on several hosts has a root relay on each host. A root relay holds the blocks that the ranks of its
host wrote. All relays then fetch a version at the same time, each from the relay before it. The chain is a
ring: the first root relay asks the last relay. A relay sends only the chunks that the next relay lacks, so no
relay sends more than one whole version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from millrace.core.types import Endpoint

SOURCES_MAX = 3
"""Sources of one fetch. Each may stay silent for seconds, and a call that does nothing for long is stuck."""


@dataclass(slots=True)
class RelayRecord:
    """One relay. `endpoint` None: the relay is not up. `versions`: what replicas of its host can read, in
    order. `older_versions`: the part of `versions` that the relay stores as deltas, and cannot send.
    `failing`: the last fetch got nothing. `due`: a version in its slots that is not digested yet; -1: none.
    `incomplete`: a version of which a root relay has only the blocks of its own host's ranks; -1: none."""

    host: str
    root: bool
    endpoint: Endpoint | None = None
    versions: tuple[int, ...] = ()
    older_versions: tuple[int, ...] = ()
    failing: bool = False
    due: int = -1
    incomplete: int = -1

    @property
    def sends(self) -> list[int]:
        """Versions that other relays can get from it."""
        return [version for version in self.versions if version not in self.older_versions]

    @property
    def newest(self) -> int:
        """-1: none."""
        return max(self.versions, default=-1)

    def can_send(self, version: int, *, coming: bool) -> bool:
        """The version, or chunks of it. `coming`: all relays but the root relays are about to receive it."""
        return version in self.sends or version == self.incomplete or (coming and not self.root)


@dataclass(frozen=True, slots=True)
class Fetch:
    """The version that a relay is to get, and its sources: addresses or directories, the preferred first."""

    version: int
    sources: tuple[str, ...]

    def sources_after(self, misses: int) -> tuple[str, ...]:
        """The sources for the next try, after `misses` tries in a row. Each miss moves on to the next
        ones."""
        first = misses * SOURCES_MAX % len(self.sources) if len(self.sources) > SOURCES_MAX else 0
        return (self.sources[first:] + self.sources[:first])[:SOURCES_MAX]


def next_fetch(
    chain: Sequence[RelayRecord],
    host: str,
    orphans: Iterable[int] = (),
    *,
    directory: str = "",
    stored: Collection[int] = (),
) -> Fetch | None:
    """What the relay of `host` gets next; None: it has every version, or no source has one that it lacks.

    The newest version comes first, then the versions that lost trajectories need (`orphans`). `chain` has
    the root relays first. The `directory` has the versions `stored`. It is the last source.
    """
    up = [relay for relay in chain if relay.endpoint is not None]
    place = next((i for i, relay in enumerate(up) if relay.host == host), None)
    if place is None:
        return None
    if up[place].root:
        version = up[place].incomplete
        return Fetch(version, addresses([*up[:place][::-1], *up[:place:-1]])) if version >= 0 else None
    newest = max(*(max(relay.newest, relay.incomplete) for relay in up), max(stored, default=-1))
    for version in (newest, *sorted(orphans, reverse=True)):
        if version >= 0 and version not in up[place].versions:
            candidates = sources(up, place, version, coming=version == newest)
            candidates += (directory,) if version in stored else ()
            if candidates:
                return Fetch(version, candidates)
    return None


def sources(up: Sequence[RelayRecord], place: int, version: int, *, coming: bool) -> tuple[str, ...]:
    """Addresses from which the relay at `place` may get `version`: the relays before it, the nearest first,
    then the relays after it. `coming`: as in `can_send`, for the relays before it."""
    before = [relay for relay in up[:place][::-1] if relay.can_send(version, coming=coming)]
    after = [relay for relay in up[place + 1 :] if version in relay.sends]
    return addresses([*before, *after])


def addresses(relays: Iterable[RelayRecord]) -> tuple[str, ...]:
    """Of the relays that are up."""
    return tuple(relay.endpoint.address for relay in relays if relay.endpoint is not None)
