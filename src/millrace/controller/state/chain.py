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

from millrace.controller.state.relays import RelayRecord

SOURCES_MAX = 3
"""Sources of one fetch. Each may stay silent for seconds, and a call that does nothing for long is stuck."""


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
    chain: Iterable[RelayRecord],
    host: str,
    wanted: Iterable[int] = (),
    *,
    directory: str = "",
    stored: Collection[int] = (),
) -> Fetch | None:
    """What the relay of `host` gets next; None: it has every version, or no source has one that it lacks.

    The newest version comes first, then the versions `wanted`, the newest first. `chain` has the root relays
    first. The `directory` has the versions `stored`. It is the last source.
    """
    up = [relay for relay in chain if relay.endpoint is not None]
    place = next((i for i, relay in enumerate(up) if relay.host == host), None)
    if place is None:
        return None
    if up[place].root:
        version = up[place].incomplete
        return Fetch(version, addresses([*up[:place][::-1], *up[:place:-1]])) if version >= 0 else None
    newest = max(*(max(relay.newest, relay.incomplete) for relay in up), max(stored, default=-1))
    for version in (newest, *sorted(wanted, reverse=True)):
        if version >= 0 and version not in up[place].versions:
            candidates = sources(up, place, version, spreading=version == newest)
            candidates += (directory,) if version in stored else ()
            if candidates:
                return Fetch(version, candidates)
    return None


def sources(up: Sequence[RelayRecord], place: int, version: int, *, spreading: bool) -> tuple[str, ...]:
    """Addresses from which the relay at `place` may get `version`: the relays before it, the nearest first,
    then the relays after it. `spreading`: as in `can_send`, for the relays before it."""
    before = [relay for relay in up[:place][::-1] if relay.can_send(version, spreading=spreading)]
    after = [relay for relay in up[place + 1 :] if version in relay.sends]
    return addresses([*before, *after])


def addresses(relays: Iterable[RelayRecord]) -> tuple[str, ...]:
    """Of the relays that are up."""
    return tuple(relay.endpoint.address for relay in relays if relay.endpoint is not None)
