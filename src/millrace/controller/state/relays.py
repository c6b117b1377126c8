"""What the controller knows of its relays, one for each host, and every transition of their records."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from millrace.core.types import Endpoint


@dataclass(slots=True)
class RelayRecord:
    """One relay. `endpoint` None: the relay is not up. `versions`: what replicas of its host can read, in
    order. `older_versions`: the part of `versions` that the relay stores as deltas, and cannot send.
    `failing`: the last fetch got nothing. `staging_version`: in its slots, not digested yet; -1: none.
    `incomplete`: a version of which a root relay has only the blocks of its own host's ranks; -1: none."""

    host: str
    root: bool
    endpoint: Endpoint | None = None
    versions: tuple[int, ...] = ()
    older_versions: tuple[int, ...] = ()
    failing: bool = False
    staging_version: int = -1
    incomplete: int = -1

    @property
    def sends(self) -> list[int]:
        """Versions that other relays can get from it."""
        return [version for version in self.versions if version not in self.older_versions]

    @property
    def newest(self) -> int:
        """-1: none."""
        return max(self.versions, default=-1)

    def can_send(self, version: int, *, spreading: bool) -> bool:
        """The version, or chunks of it. `spreading`: all relays but the root relays are about to get it."""
        return version in self.sends or version == self.incomplete or (spreading and not self.root)


class Relays(dict[str, RelayRecord]):
    """Every relay of the run by host, up or not, in the order of the chain: the root relays first."""

    def __init__(self, hosts: Iterable[str], roots: Collection[str], directory: str = "") -> None:
        ordered = sorted(hosts, key=lambda host: host not in roots)
        super().__init__((host, RelayRecord(host, host in roots)) for host in ordered)
        self.newest = -1
        """The newest version that any host holds; -1: none."""
        self.rewritten = 0
        """How often ranks on several hosts wrote a version again, or an earlier version."""
        self._written_version = -1
        self._staged: dict[int, str] = {}
        self.directory, self.stored_versions = directory, set[int]()

    def join(self, host: str) -> None:
        """A host becomes a part of the run, the last of the chain. Its relay is not up yet."""
        assert host not in self, host
        self[host] = RelayRecord(host, root=False)

    def gone(self, host: str) -> None:
        """The relay of `host` has ended, and no replica is there."""
        assert self[host].endpoint is None, self[host]
        del self[host]

    def up(self, host: str, endpoint: Endpoint) -> None:
        """The relay is open and holds no version yet."""
        self[host].endpoint, self[host].failing = endpoint, False

    def down(self, host: str) -> None:
        """The relay is gone, and its versions with it."""
        self[host].endpoint, self[host].staging_version = None, -1
        self.set_versions(host, ())
        if self[host].root:  # no other relay may have the blocks of its ranks; the ranks write them again
            for relay in self.values():
                relay.incomplete = -1

    def set_versions(self, host: str, versions: Iterable[int], older_versions: Iterable[int] = ()) -> None:
        """What replicas on `host` can pull from now on. The relay stores `older_versions` as deltas."""
        self[host].versions, self[host].older_versions = tuple(versions), tuple(older_versions)
        self.newest = max((relay.newest for relay in self.values()), default=-1)

    def put(self, host: str, version: int) -> None:
        """The trainer has copied `version` there. Replicas can pull it once it is digested and staged."""
        self[host].staging_version = version

    def wrote(self, version: int, digest: str) -> None:
        """Each root relay has the blocks of `version` that the ranks of its host wrote. It gets the others
        from other relays."""
        self.rewritten += version <= self._written_version
        self._written_version = version
        self.staged(version, digest)
        for relay in self.values():
            relay.incomplete = version if relay.root else -1

    def arrived(self, host: str, version: int) -> None:
        """Replicas wait no longer for `version` or an older one: they can pull it, or it will not come."""
        if self[host].staging_version <= version:
            self[host].staging_version = -1

    def staged(self, version: int, digest: str) -> None:
        """At a root relay. A repeated step may have other weights: some devices repeat a step only up to
        rounding. Then no other relay counts as having `version` any more."""
        if self._staged.get(version, digest) != digest:
            for relay in self.values():
                if not relay.root:
                    self.set_versions(
                        relay.host, [v for v in relay.versions if v != version], relay.older_versions
                    )
        self.stored_versions = {v for v in self.stored_versions if v < version}  # later versions were undone
        versions = {v for relay in self.values() for v in relay.versions}
        self._staged = {v: d for v, d in self._staged.items() if v in versions} | {version: digest}

    def pullable(self, hosts: Collection[str]) -> tuple[int, ...]:
        """All versions that replicas on `hosts` can pull, now or after a fetch, ascending."""
        if len(self) == 1:
            (only,) = self.values()
            return only.versions
        fetching = any(relay.endpoint is not None and not relay.root for relay in self.of(hosts))
        versions = {version for relay in self.of(hosts) for version in relay.versions}
        if fetching:
            versions.update(version for relay in self.values() for version in relay.sends)
        return tuple(sorted(versions))

    def of(self, hosts: Collection[str]) -> list[RelayRecord]:
        return [relay for relay in self.values() if relay.host in hosts]

    def fetching_version(self, host: str) -> int:
        """The version that the relay of `host` is about to get from another one; -1: none."""
        relay = self[host]
        fetching = relay.endpoint is not None and not (relay.root or relay.failing)
        return self.newest if fetching and relay.newest < self.newest else -1

    def note_stored(self, version: int, is_there: bool = True) -> None:
        """Whether the directory has `version`."""
        (self.stored_versions.add if is_there else self.stored_versions.discard)(version)
