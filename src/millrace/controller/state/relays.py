"""What the controller knows of its relays, one a host, and every transition of that."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from millrace.controller.state.chain import Fetch, RelayRecord, next_fetch
from millrace.core.types import Endpoint


class Relays(dict[str, RelayRecord]):
    """Every relay of the run by host, up or not, in the order of the chain: the heads first."""

    def __init__(self, hosts: Iterable[str], heads: Collection[str], directory: str = "") -> None:
        ordered = sorted(hosts, key=lambda host: host not in heads)
        super().__init__((host, RelayRecord(host, host in heads)) for host in ordered)
        self.newest = -1
        """The newest version that any host holds; -1: none."""
        self.rewritten = 0
        """How often ranks on several hosts wrote a version again, or an earlier one."""
        self._wrote = -1
        self._staged: dict[int, str] = {}
        self._directory, self._stored = directory, set[int]()

    def join(self, host: str) -> None:
        """A host becomes a part of the run, the last of the chain. Its relay is not up yet."""
        assert host not in self, host
        self[host] = RelayRecord(host, head=False)

    def gone(self, host: str) -> None:
        """Its relay has ended, and no replica is there."""
        assert self[host].endpoint is None, self[host]
        del self[host]

    def up(self, host: str, endpoint: Endpoint) -> None:
        """It is open and holds nothing yet."""
        self[host].endpoint, self[host].failing = endpoint, False

    def down(self, host: str) -> None:
        """It is gone, and what it held with it."""
        self[host].endpoint, self[host].due = None, -1
        self.holds(host, ())
        if self[host].head:  # nobody else may have what its ranks wrote; they write it again
            for relay in self.values():
                relay.part = -1

    def holds(self, host: str, versions: Iterable[int], past: Iterable[int] = ()) -> None:
        """What replicas on `host` can pull from now on; `past`: what its relay keeps as deltas."""
        self[host].held, self[host].past = tuple(versions), tuple(past)
        self.newest = max((relay.newest for relay in self.values()), default=-1)

    def put(self, host: str, version: int) -> None:
        """The trainer has copied `version` there. Replicas can pull it once it is digested and staged."""
        self[host].due = version

    def wrote(self, version: int, digest: str) -> None:
        """Each head has what the ranks of its host wrote of `version`, and gets the rest from others."""
        self.rewritten += version <= self._wrote
        self._wrote = version
        self.staged(version, digest)
        for relay in self.values():
            relay.part = version if relay.head else -1

    def arrived(self, host: str, version: int) -> None:
        """Nobody is to wait any longer for `version` or an older one: it can be pulled, or will not come."""
        if self[host].due <= version:
            self[host].due = -1

    def staged(self, version: int, digest: str) -> None:
        """At a head. With other weights than before (some devices repeat a step only up to rounding), hosts
        after it do not count as having it any more."""
        if self._staged.get(version, digest) != digest:
            for relay in self.values():
                if not relay.head:
                    self.holds(relay.host, [held for held in relay.held if held != version], relay.past)
        self._stored = {v for v in self._stored if v < version}  # what comes after was undone
        held = {held for relay in self.values() for held in relay.held}
        self._staged = {v: d for v, d in self._staged.items() if v in held} | {version: digest}

    def held(self, hosts: Collection[str]) -> tuple[int, ...]:
        """All versions that replicas on `hosts` can pull, now or after a fetch, ascending."""
        if len(self) == 1:
            (only,) = self.values()
            return only.held
        fetching = any(relay.endpoint is not None and not relay.head for relay in self.of(hosts))
        found = {version for relay in self.of(hosts) for version in relay.held}
        if fetching:
            found.update(version for relay in self.values() for version in relay.sends)
        return tuple(sorted(found))

    def of(self, hosts: Collection[str]) -> list[RelayRecord]:
        return [relay for relay in self.values() if relay.host in hosts]

    def coming(self, host: str) -> int:
        """The version that the relay of `host` is about to have; -1: none."""
        relay = self[host]
        fetching = relay.endpoint is not None and not (relay.head or relay.failing)
        return self.newest if fetching and relay.newest < self.newest else -1

    def next_fetch(self, host: str, orphans: Iterable[int]) -> Fetch | None:
        """What the relay of `host` gets next; None: nothing."""
        chain = list(self.values())
        return next_fetch(chain, host, orphans, directory=self._directory, stored=self._stored)

    def stored(self, version: int, there: bool = True) -> None:
        """Whether the directory has it."""
        (self._stored.add if there else self._stored.discard)(version)
