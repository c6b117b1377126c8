"""What the controller knows of its replicas, and every transition of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.core.placement import THIS_HOST
from millrace.core.types import ReplicaLoad, Trajectory
from millrace.schedule.view import ReplicaView


@dataclass(slots=True)
class ReplicaRecord:
    """One replica. `leased` holds what it may work on, in the order of the leases."""

    name: str
    slots: int
    kv_capacity_tokens: int
    host: str = THIS_HOST
    leaving: str = ""  # why it leaves; empty: it stays
    epoch: int = 0
    alive: bool = False
    version: int = -1
    pulling: int = -1  # the version that a pull under way takes it to
    moves: set[str] = field(default_factory=set)  # sources of the moves under way from or to it
    leased: dict[int, Trajectory] = field(default_factory=dict)
    load: ReplicaLoad = field(default_factory=lambda: ReplicaLoad(version=-1))
    kv_used_previous: int = 0
    groups_since_swap: int = 0

    @property
    def busy(self) -> bool:
        return self.pulling >= 0 or bool(self.moves)

    def view(self, held: tuple[int, ...] | None = None, coming: int = -1, due: int = -1) -> ReplicaView:
        """`held` and `coming`: of its host, where there are several."""
        leased = len(self.leased)
        return ReplicaView(
            replica_id=self.name,
            version=self.version,
            busy=self.busy,
            pulling_version=self.pulling,
            running=min(leased, self.slots),
            waiting=max(0, leased - self.slots),
            slots=self.slots,
            kv_used_tokens=self.load.kv_used_tokens if leased else 0,
            kv_used_tokens_previous=self.kv_used_previous,
            kv_capacity_tokens=self.load.kv_capacity_tokens or self.kv_capacity_tokens,
            steps_since_swap=self.load.steps_since_swap,
            groups_since_swap=self.groups_since_swap,
            held=held,
            coming=coming,
            due=due,
        )


class Replicas(dict[str, ReplicaRecord]):
    """Every replica of the run by name, up or not, in the order in which they joined."""

    @property
    def staying(self) -> list[ReplicaRecord]:
        """Those that are not about to leave."""
        return [record for record in self.values() if not record.leaving]

    def join(self, record: ReplicaRecord) -> None:
        """A replica becomes a part of the run. It is not up yet."""
        assert record.name not in self, record.name
        self[record.name] = record

    def leave(self, name: str, reason: str) -> None:
        """From now on nothing new goes to it. Moves that are under way to it end elsewhere."""
        self[name].leaving = reason
        self[name].moves.clear()

    def gone(self, name: str) -> None:
        """It has left: its process is dead, and it holds no lease."""
        record = self.pop(name)
        assert record.leaving and not record.leased, record

    def up(self, name: str, epoch: int) -> None:
        """An incarnation begins: it serves nothing and holds nothing."""
        record = self[name]
        record.alive, record.epoch, record.version = True, epoch, -1
        record.load, record.kv_used_previous, record.groups_since_swap = ReplicaLoad(version=-1), 0, 0

    def down(self, name: str) -> None:
        """It is gone. Its leases are the caller's to take back."""
        record = self[name]
        record.alive, record.version, record.pulling = False, -1, -1
        record.moves.clear()

    def begin_pull(self, name: str, version: int) -> None:
        self[name].pulling = version

    def end_pull(self, name: str) -> None:
        self[name].pulling = -1

    def served(self, name: str, version: int) -> None:
        """It computes with another version now."""
        self[name].version, self[name].groups_since_swap = version, 0

    def reported(self, name: str, load: ReplicaLoad) -> None:
        self[name].load = load

    def begin_move(self, source: str, destinations: Iterable[str]) -> None:
        """From here on all of them are busy, until every move that they are part of has ended."""
        for name in (source, *destinations):
            self[name].moves.add(source)

    def end_move(self, source: str, destinations: Iterable[str]) -> list[str]:
        """Returns the destinations that have not changed since the move began: the same incarnation, the same
        version, no pull ahead. After its end a move has none."""
        held = [name for name in destinations if name in self and source in self[name].moves]
        for name in (source, *held):
            self[name].moves.discard(source)
        return held

    def note_kv(self) -> None:
        """The KV use of now is what the next look at repacks compares with."""
        for record in self.values():
            record.kv_used_previous = record.load.kv_used_tokens
