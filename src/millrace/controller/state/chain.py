"""The chain that versions go down, from relay to relay: who asks whom for what. Pure.

The heads are the relays of the trainer's hosts, into which it writes. Each of the others gets the newest
version from the one before it, which forwards while it receives. If that one does not answer, it asks those
before that one. A relay that is down is left out, so the chain closes around it. Behind them all is the
directory of weights, if the run has one: it outlives every relay.

A head asks nobody: the trainer writes its current version into a new head.

A trainer on several hosts has a head on each, which holds what the ranks there wrote. All relays then get a
version at the same time, each from the one before it, and the chain is a ring: the first head asks the last
relay. A relay sends what the next one lacks, so nobody sends more than one whole version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from millrace.core.types import Endpoint

SOURCES_MAX = 3
"""Asked in one fetch. Each may stay silent for seconds, and a call that does nothing for long is stuck."""


@dataclass(slots=True)
class RelayRecord:
    """One relay. `endpoint` None: it is not up. `held`: versions that replicas of its host read, in order;
    `past`: those of them that it keeps as deltas, and cannot send. `failing`: the last fetch got nothing.
    `due`: a version that lies in its slots and is not digested yet; -1: none. `part`: a version of which a
    head holds what the ranks of its host wrote, and is to get the rest; -1: none."""

    host: str
    head: bool
    endpoint: Endpoint | None = None
    held: tuple[int, ...] = ()
    past: tuple[int, ...] = ()
    failing: bool = False
    due: int = -1
    part: int = -1

    @property
    def sends(self) -> list[int]:
        """Versions that other relays can have from it."""
        return [version for version in self.held if version not in self.past]

    @property
    def newest(self) -> int:
        """-1: none."""
        return max(self.held, default=-1)

    def can_send(self, version: int, *, coming: bool) -> bool:
        """All of it, or of part of it. `coming`: to those that are no heads."""
        return version in self.sends or version == self.part or (coming and not self.head)


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a relay is to get, and the addresses or directories that it asks, the preferred one first."""

    version: int
    sources: tuple[str, ...]

    def asked(self, misses: int) -> tuple[str, ...]:
        """The sources for one try after so many in a row that got nothing: the next ones after each miss."""
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
    """What the relay of `host` gets next; None: it has everything, or nobody could give it.

    The newest version comes first, then those that lost trajectories (`orphans`) need to go on. `chain` has
    the heads first. The `directory`, which has the versions `stored`, is asked when no relay can help.
    """
    up = [relay for relay in chain if relay.endpoint is not None]
    place = next((i for i, relay in enumerate(up) if relay.host == host), None)
    if place is None:
        return None
    if up[place].head:
        part = up[place].part
        return Fetch(part, addresses([*up[:place][::-1], *up[:place:-1]])) if part >= 0 else None
    newest = max(*(max(relay.newest, relay.part) for relay in up), max(stored, default=-1))
    for version in (newest, *sorted(orphans, reverse=True)):
        if version >= 0 and version not in up[place].held:
            asked = sources(up, place, version, coming=version == newest)
            asked += (directory,) if version in stored else ()
            if asked:
                return Fetch(version, asked)
    return None


def sources(up: Sequence[RelayRecord], place: int, version: int, *, coming: bool) -> tuple[str, ...]:
    """Addresses at which the relay at `place` may ask for `version`: those before it, the nearest first, then
    those after it. `coming`: the ones before it that are no heads have it or are just getting it."""
    before = [relay for relay in up[:place][::-1] if relay.can_send(version, coming=coming)]
    after = [relay for relay in up[place + 1 :] if version in relay.sends]
    return addresses([*before, *after])


def addresses(relays: Iterable[RelayRecord]) -> tuple[str, ...]:
    """Of those that are up."""
    return tuple(relay.endpoint.address for relay in relays if relay.endpoint is not None)
