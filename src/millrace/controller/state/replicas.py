"""What the controller knows of its replicas, and every transition of their records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.core.placement import THIS_HOST
from millrace.core.types import ReplicaLoad, Trajectory
from millrace.schedule.device_turns import Use
from millrace.schedule.view import ReplicaView


@dataclass(slots=True)
class ReplicaRecord:
    """One replica. `leased`: the trajectories that it may work on, in the order of their leases."""

    name: str
    slots: int
    kv_capacity_tokens: int
    host: str = THIS_HOST
    leaving: str = ""  # why the replica leaves; empty: it stays
    epoch: int = 0
    alive: bool = False
    version: int = -1
    pulling: int = -1  # the version of the pull under way; -1: none
    use: Use = Use.AWAKE  # of a device that is lent in turns
    moves: set[str] = field(default_factory=set)  # sources of the moves under way from or to this replica
    leased: dict[int, Trajectory] = field(default_factory=dict)
    load: ReplicaLoad = field(default_factory=lambda: ReplicaLoad(version=-1))
    kv_used_previous: int = 0
    groups_since_swap: int = 0

    @property
    def busy(self) -> bool:
        return self.pulling >= 0 or bool(self.moves) or self.use is not Use.AWAKE

    def view(
        self, versions: tuple[int, ...] | None, fetching_version: int, staging_version: int
    ) -> ReplicaView:
        """`versions` and `fetching_version`: of the replica's host, if the run has several hosts."""
        leased = len(self.leased)
        running = leased if leased < self.slots else self.slots
        return ReplicaView(
            replica_id=self.name,
            version=self.version,
            busy=self.busy,
            pulling_version=self.pulling,
            running=running,
            waiting=leased - running,
            slots=self.slots,
            kv_used_tokens=self.load.kv_used_tokens if leased else 0,
            kv_used_tokens_previous=self.kv_used_previous,
            kv_capacity_tokens=self.load.kv_capacity_tokens or self.kv_capacity_tokens,
            steps_since_swap=self.load.steps_since_swap,
            groups_since_swap=self.groups_since_swap,
            pullable=versions,
            fetching_version=fetching_version,
            staging_version=staging_version,
        )


class Replicas(dict[str, ReplicaRecord]):
    """Every replica of the run by name, up or not, in the order in which they joined."""

    @property
    def staying(self) -> list[ReplicaRecord]:
        """The replicas that are not about to leave."""
        return [record for record in self.values() if not record.leaving]

    def join(self, record: ReplicaRecord) -> None:
        """A replica becomes a part of the run. Its process is not up yet."""
        assert record.name not in self, record.name
        self[record.name] = record

    def leave(self, name: str, reason: str) -> None:
        """The replica gets no new work from now on. Moves under way to it end on other replicas."""
        self[name].leaving = reason
        self[name].moves.clear()

    def gone(self, name: str) -> None:
        """The replica has left: its process is dead, and it has no lease."""
        record = self.pop(name)
        assert record.leaving and not record.leased, record

    def up(self, name: str, epoch: int) -> None:
        """An incarnation begins: it serves no version and has no lease."""
        record = self[name]
        record.alive, record.epoch, record.version = True, epoch, -1
        record.load, record.kv_used_previous, record.groups_since_swap = ReplicaLoad(version=-1), 0, 0

    def down(self, name: str) -> None:
        """The incarnation is gone. The caller takes back its leases."""
        record = self[name]
        record.alive, record.version, record.pulling = False, -1, -1
        record.moves.clear()

    def uses(self, name: str, use: Use) -> None:
        """The replica begins or ends to sleep or to wake. Moves to it end on other replicas."""
        record = self[name]
        record.use, record.version = use, -1 if use is Use.ASLEEP else record.version
        record.moves.clear()

    def begin_pull(self, name: str, version: int) -> None:
        self[name].pulling = version

    def end_pull(self, name: str) -> None:
        self[name].pulling = -1

    def served(self, name: str, version: int) -> None:
        """The replica computes with another version now."""
        self[name].version, self[name].groups_since_swap = version, 0

    def reported(self, name: str, load: ReplicaLoad) -> None:
        self[name].load = load

    def begin_move(self, source: str, destinations: Iterable[str]) -> None:
        """Source and destinations are busy from now on, until all of their moves have ended."""
        for name in (source, *destinations):
            self[name].moves.add(source)

    def end_move(self, source: str, destinations: Iterable[str]) -> list[str]:
        """Returns the destinations that have not changed since the move began: the same incarnation, the same
        version, no pull ahead. A second call returns none."""
        unchanged = [name for name in destinations if name in self and source in self[name].moves]
        for name in (source, *unchanged):
            self[name].moves.discard(source)
        return unchanged

    def note_kv(self) -> None:
        """The next repack compares the KV use with the KV use of now."""
        for record in self.values():
            record.kv_used_previous = record.load.kv_used_tokens
