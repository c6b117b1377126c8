"""Repack on demand: empty a replica only when the newest weights have work for it.

Laminar packs whatever ramps down, as densely as fits. Under a staleness bound that can be too much, twice: an
emptied replica is idle where the bound leaves no room for new groups, and stragglers that share a full
replica decode slower, although it is they whom the trainer waits for at their deadline. So here

- as many replicas are emptied as it takes to start what the bound admits, and no more;
- those with the fewest trajectories go first, each whole onto the *emptiest* other one under its version that
  takes it within `trajectories_max`;
- only replicas behind the newest version take part: the others still start new groups.

Measured against Laminar's rule in docs/experiments.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millrace.schedule.deadlines import groups_room
from millrace.schedule.view import Move, ReplicaView, View

PACKED_MAX = 48
"""Trajectories on a replica that takes others' in: about where the KV of long ones makes a decode step twice
as long as that of a single one (7B to 72B on H800, `sim/generation.py`). See benchmarks/policies.py."""


@dataclass(frozen=True, slots=True)
class OnDemand:
    """`staleness_max` is the schedule's. `batch_max` None: what a replica surely runs at a time, and not more
    than `PACKED_MAX`."""

    interval_s: float
    staleness_max: int | None
    batch_max: int | None = None

    def moves(self, view: View) -> list[Move]:
        wanted = replicas_wanted(view, groups_room(view, self.staleness_max))
        behind = [replica for replica in view.replicas if replica.serving and replica.version < view.newest]
        limit = max((self._limit(view, replica) for replica in behind), default=1)
        return plan_demand(behind, wanted=wanted, trajectories_max=self.batch_max or limit)

    def _limit(self, view: View, replica: ReplicaView) -> int:
        at_their_longest = replica.kv_capacity_tokens // view.max_sequence_tokens
        return max(1, min(replica.slots, at_their_longest, PACKED_MAX))

    def describe(self) -> str:
        limit = f"{PACKED_MAX} trajectories, and what it holds at their longest"
        if self.batch_max is not None:
            limit = f"{self.batch_max} trajectories"
        return (
            f"every {self.interval_s:g} s and after each update: as many replicas are emptied as new groups "
            f"have use for, onto the emptiest under their version, up to {limit}"
        )


def replicas_wanted(view: View, room: int) -> int:
    """Replicas to empty so that `room` new groups can start, beyond those that can take them already: on the
    newest weights or on their way there."""
    ready = [r for r in view.replicas if r.version_next >= view.newest or r.load == 0]
    free = sum(max(0, replica.slots - replica.load) for replica in ready) // view.group_size
    slots = max((replica.slots for replica in view.replicas), default=1)
    return max(0, -(-(room - free) * view.group_size // slots))


def plan_demand(replicas: Iterable[ReplicaView], *, wanted: int, trajectories_max: int) -> list[Move]:
    """At most `wanted` moves among `replicas`.

    Guarantees: same version only; the limit holds with everything already planned; no replica is both source
    and destination. Equal loads go by the order given.
    """
    candidates = [replica for replica in replicas if replica.load]
    load = {replica.replica_id: replica.load for replica in candidates}
    moves: list[Move] = []
    sources: set[str] = set()
    destinations: set[str] = set()
    for source in sorted(candidates, key=lambda replica: replica.load):
        if len(moves) >= wanted:
            break
        if source.replica_id in destinations:
            continue
        fitting = [
            other
            for other in candidates
            if other.version == source.version
            and other.replica_id != source.replica_id
            and other.replica_id not in sources
            and load[other.replica_id] + source.load <= trajectories_max
        ]
        if fitting:
            best = min(fitting, key=lambda replica: load[replica.replica_id])
            load[best.replica_id] += source.load
            sources.add(source.replica_id)
            destinations.add(best.replica_id)
            moves.append(Move(source.replica_id, best.replica_id))
    return moves
