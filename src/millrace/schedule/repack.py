"""Repack: consolidate the long tail, so that emptied replicas take new weights and start anew.

Laminar, arXiv:2510.12633 (repack algorithm). Replicas that serve the same version and are ramping down
hand all of their trajectories to one another:

    S = {r : C_used(r) < min(C_max, C_prev(r)) and 0 < N(r) < B}

in ascending order of C_used, each source s moves as a whole onto the destination d of S with

    C(d) + C(planned for d) + C(s) <= C_max    and    N(d) + N(planned for d) + N(s) <= B

that has the highest projected KV load (best fit). C is KV use, and C_prev the KV use at the tick before: a
replica whose KV use still grows is ramping up and takes no part. N counts running and waiting trajectories.
B is the roofline decode batch.

**On demand**: empty a replica only when the newest weights have work for it.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from millrace.schedule.ahead import Ahead
from millrace.schedule.deadlines import startable_groups
from millrace.schedule.view import RepackOrder, ReplicaView, View


class Repack(Protocol):
    """The decision to move running trajectories between replicas."""

    @property
    def interval_s(self) -> float:
        """Seconds between two calls of `moves`. Another call follows each new version."""

    def moves(self, view: View) -> list[RepackOrder]:
        """Moves to make now. Source and destination serve the same version and are not busy."""

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class BestFit:
    """The published algorithm. `batch_max` (B) None: the slots of the destination."""

    interval_s: float
    kv_fraction_max: float
    batch_max: int | None = None

    def moves(self, view: View) -> list[RepackOrder]:
        return plan(view.replicas, kv_max_tokens_fraction=self.kv_fraction_max, batch_max=self.batch_max)

    def describe(self) -> str:
        return (
            f"every {self.interval_s:g} s and after each update: replicas that ramp down under one version "
            f"are packed up to {self.kv_fraction_max:.0%} of KV"
        )


def plan(
    replicas: Iterable[ReplicaView], *, kv_max_tokens_fraction: float, batch_max: int | None
) -> list[RepackOrder]:
    """Which replicas hand all of their trajectories to which.

    C_max is `kv_max_tokens_fraction` of the replica's own capacity, so replicas may differ in size.
    Guarantees: same version only; both limits include every planned move; no replica is both source and
    destination; busy and ramping-up replicas take no part. Equal loads go by the order of `replicas`.
    """
    by_version: dict[int, list[_Ramping]] = defaultdict(list)
    for replica in replicas:
        candidate = _Ramping.of(replica, kv_max_tokens_fraction, batch_max)
        if candidate.takes_part:
            by_version[replica.version].append(candidate)
    return [move for group in by_version.values() for move in _plan_version(group)]


@dataclass(slots=True)
class _Ramping:
    """A replica with its limits, and its load after the moves planned so far."""

    replica: ReplicaView
    kv_tokens_max: float
    trajectories_max: int
    kv_tokens: int
    trajectories: int
    receives: bool = False
    emptied: bool = False

    @classmethod
    def of(cls, replica: ReplicaView, fraction: float, batch_max: int | None) -> _Ramping:
        return cls(
            replica,
            kv_tokens_max=fraction * replica.kv_capacity_tokens,
            trajectories_max=batch_max or replica.slots,
            kv_tokens=replica.kv_used_tokens,
            trajectories=replica.load,
        )

    @property
    def takes_part(self) -> bool:
        ramps_down = self.kv_tokens < min(self.kv_tokens_max, self.replica.kv_used_tokens_previous)
        return self.replica.serving and ramps_down and 0 < self.trajectories < self.trajectories_max

    def fits(self, source: _Ramping) -> bool:
        return (
            self.kv_tokens + source.kv_tokens <= self.kv_tokens_max
            and self.trajectories + source.trajectories <= self.trajectories_max
        )


def _plan_version(candidates: list[_Ramping]) -> list[RepackOrder]:
    moves = []
    for source in sorted(candidates, key=lambda c: c.kv_tokens):
        if source.receives:
            continue
        fitting = [d for d in candidates if d is not source and not d.emptied and d.fits(source)]
        if not fitting:
            continue
        best = max(fitting, key=lambda d: d.kv_tokens)
        best.kv_tokens += source.kv_tokens
        best.trajectories += source.trajectories
        best.receives, source.emptied = True, True
        moves.append(RepackOrder(source.replica.replica_id, {best.replica.replica_id: source.replica.load}))
    return moves


# ---------------------------------------------------------------- on demand


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
