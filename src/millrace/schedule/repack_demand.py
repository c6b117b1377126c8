"""Repack on demand: empty a replica only when the newest weights have work for it.

Laminar packs all replicas that ramp down, as densely as possible. Under a staleness bound that can be too
much, for two reasons. An emptied replica is idle if the bound leaves no room for new groups. The last
trajectories of a version decode slower on a full replica, and at their deadline the trainer waits for them.
So

- only as many replicas are emptied as the groups need that the bound admits;
- the replicas with the fewest trajectories go first;
- each trajectory goes to the *emptiest* other replica of its version at that moment, within a limit. So a
  replica that fits nowhere as a whole can be emptied too;
- only replicas behind the newest version take part: the others still start new groups.

Measured against Laminar's rule in reports/experiments.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from millrace.schedule.ahead import Ahead
from millrace.schedule.deadlines import startable_groups
from millrace.schedule.view import RepackOrder, ReplicaView, View

PACKED_MAX = 48
"""Trajectories at most on a replica that receives some. The KV of so many long trajectories doubles the time
of a decode step (7B to 72B on H800, `millrace_sim/costs/generation.py`). See reports/experiments.md."""


@dataclass(frozen=True, slots=True)
class OnDemand:
    """`ahead` is the schedule's. `batch_max` None: as many trajectories as a replica can run at their
    longest, and at most `PACKED_MAX`."""

    interval_s: float
    ahead: Ahead
    batch_max: int | None = None

    def moves(self, view: View) -> list[RepackOrder]:
        room = startable_groups(view, self.ahead.staleness_max, self.ahead.wanted_groups_max(view))
        wanted = replicas_wanted(view, room)
        behind = [r for r in view.replicas if r.serving and r.version < view.newest_for(r)]
        return plan_demand(behind, [self._limit(view, replica) for replica in behind], wanted=wanted)

    def _limit(self, view: View, replica: ReplicaView) -> int:
        if self.batch_max is not None:
            return self.batch_max
        at_their_longest = replica.kv_capacity_tokens // view.max_sequence_tokens
        return max(1, min(replica.slots, at_their_longest, PACKED_MAX))

    def describe(self) -> str:
        limit = f"{PACKED_MAX} trajectories, and what it holds at their longest"
        if self.batch_max is not None:
            limit = f"{self.batch_max} trajectories"
        return (
            f"every {self.interval_s:g} s and after each update: as many replicas are emptied as new groups "
            f"have use for, spread over the emptiest under their version, up to {limit} each"
        )


def replicas_wanted(view: View, room: int) -> int:
    """Replicas to empty so that `room` new groups can start. Replicas on the newest weights, or pulling them,
    can start groups already, so they need not be emptied."""
    ready = [r for r in view.replicas if r.version_next >= view.newest_for(r) or r.load == 0]
    free = sum(max(0, replica.slots - replica.load) for replica in ready) // view.start_size
    slots = max((replica.slots for replica in view.replicas), default=1)
    return max(0, -(-(room - free) * view.start_size // slots))


def plan_demand(replicas: Sequence[ReplicaView], limits: Sequence[int], *, wanted: int) -> list[RepackOrder]:
    """At most `wanted` moves. `limits`: for each of `replicas`, its trajectories at most if it receives any.

    Guarantees: same version only; the limits include every planned move; no replica is both source and
    destination. Equal loads go by the order of `replicas`.
    """
    loads = [_Load(replica, limit, replica.load) for replica, limit in zip(replicas, limits, strict=True)]
    room, emptiest = Counter[int](), defaultdict[int, _Heap](list)  # by version
    for index, load in enumerate(loads):
        if load.num and load.room:
            room[load.replica.version] += load.room
            emptiest[load.replica.version].append((load.num, index, load))
    for heap in emptiest.values():
        heapify(heap)
    moves: list[RepackOrder] = []
    for source in sorted(loads, key=lambda load: load.num):
        version = source.replica.version
        if len(moves) >= wanted:
            break
        if source.num and not source.receives and source.num <= room[version] - source.room:
            room[version] -= source.room + source.num
            source.emptied = True
            shares = Counter(_spread(source.num, emptiest[version]))
            moves.append(RepackOrder(source.replica.replica_id, dict(shares)))
    return moves


@dataclass(slots=True)
class _Load:
    """A replica, and its load after the moves planned so far."""

    replica: ReplicaView
    limit: int
    num: int
    receives: bool = False
    emptied: bool = False

    @property
    def room(self) -> int:
        return max(0, self.limit - self.num)


_Heap = list[tuple[int, int, _Load]]
"""(load, position, replica) of replicas with room. An emptied replica is dropped when it comes up."""


def _spread(num: int, heap: _Heap) -> Iterator[str]:
    """The destinations of `num` trajectories, one by one."""
    while num:
        _, index, best = heappop(heap)
        if best.emptied:
            continue
        best.num, best.receives, num = best.num + 1, True, num - 1
        if best.room:
            heappush(heap, (best.num, index, best))
        yield best.replica.replica_id
