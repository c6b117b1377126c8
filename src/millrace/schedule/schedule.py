"""A schedule: five decisions that differ between schedules, and three safeguards that do not.

Decisions: `admit` and `route` (one question: where does a new group start now?), `refresh`, `repack`, `take`.
Each decision has a rule in the file of its name. The staleness bound, the end of the run and first pulls are
the same for every rule, so they are here.

Safeguards, for trajectories and groups after a fault: `place` (on which replica does a queued trajectory go
on?), `restart` (which trajectories must begin again?), `expire` (which groups end as stale?).

Pure: every method is a function of the view. So a simulated controller decides as a real one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from millrace.schedule.admit import Admit
from millrace.schedule.ahead import Ahead, TailRounds, WithCapacity
from millrace.schedule.deadlines import Deadlines, choose, overdue, remaining_groups_max
from millrace.schedule.lengths import Pair
from millrace.schedule.place import placements
from millrace.schedule.refresh import Refresh
from millrace.schedule.repack import Repack
from millrace.schedule.route import Route
from millrace.schedule.take import Take
from millrace.schedule.view import QueuedView, RefreshOrder, RepackOrder, ReplicaView, View


@dataclass(frozen=True, slots=True)
class Schedule:
    """Five decisions under one staleness bound.

    `staleness_max` None: unbounded. `mixes_versions`: whether one trajectory may have tokens of several
    versions. A refresh rule needs `mixes_versions` if trajectories in flight go on under new weights.
    `one_version`: all turns of a trajectory have one version. `redundant_samples`, `redundant_groups`: what
    starts beyond a group and a batch. The first that are complete are trained, and the others end.
    `parks`: groups beyond a batch begin again in a long round.
    """

    kind: str
    staleness_max: int | None
    admit_rule: Admit
    route_rule: Route
    refresh_rule: Refresh
    take_rule: Take
    mixes_versions: bool = False
    repack_rule: Repack | None = None
    ahead_rule: Ahead | WithCapacity | TailRounds | None = None
    pair_rule: Pair | None = None
    one_version: bool = False
    redundant_samples: int = 0
    redundant_groups: int = 0
    parks: bool = False

    @property
    def repack_interval_s(self) -> float | None:
        """Seconds between two calls of `repack`; None: never."""
        return None if self.repack_rule is None else self.repack_rule.interval_s

    def admit(self, view: View) -> list[str]:
        """Replica ids: one new group may start now on each entry, in this order (repeats allowed).

        A group enters only if it and all live groups can still be trained by their deadlines. Groups beyond
        what the remaining steps consume never enter. A busy replica reserves places of the bound for its time
        after the pull, and gets no group yet. Call it after `refresh`.
        """
        left = self.live_groups_max(view) - len(view.groups)
        if left <= 0:
            return []
        replicas = self._after_pulls(view)
        room = [self.admit_rule.room(view, replica) for replica in replicas]
        load = [replica.load for replica in replicas]
        queue: list[tuple[float, int]] = []
        for index, replica in enumerate(replicas):
            rank = self.route_rule.rank(view, replica, load[index]) if room[index] > 0 else None
            if rank is not None:
                queue.append((rank, index))
        heapify(queue)
        book = Deadlines(view, self.staleness_max, view.births)
        admitted = []
        while queue and left:
            _, index = heappop(queue)
            replica = replicas[index]
            if not book.places_left(replica.version):
                continue
            book.add(replica.version)
            if not replica.busy:
                admitted.append(replica.replica_id)
            left, room[index], load[index] = left - 1, room[index] - 1, load[index] + view.start_size
            rank = self.route_rule.rank(view, replica, load[index]) if room[index] else None
            if rank is not None:
                heappush(queue, (rank, index))
        return admitted

    def pair(self, view: View, replicas: list[str], lengths: Sequence[float | None]) -> list[tuple[int, str]]:
        """Which of the next prompts starts on which of the admitted `replicas`: pairs of the prompt's index
        and a replica, in the order of their start. `lengths`: predicted tokens; None: unknown."""
        pairs = list(zip(range(len(lengths)), replicas, strict=False))
        return self.pair_rule.pairs(view, pairs, lengths) if self.pair_rule else pairs

    def live_groups_max(self, view: View) -> int:
        """Live groups at most: what the remaining steps consume, a named limit where unbounded, and
        no further ahead than is wanted."""
        allowed = remaining_groups_max(view, self.staleness_max)
        return allowed if self.ahead_rule is None else min(allowed, self.ahead_rule.wanted_groups_max(view))

    def place(self, view: View, queued: Sequence[QueuedView]) -> list[str | None]:
        """A replica for each queued trajectory, in their order; None: wait. See `schedule.place`."""
        return placements(view, queued, mixes_versions=self.mixes_versions)

    def refresh(self, view: View) -> list[RefreshOrder]:
        """Which replicas take which version now. Busy replicas get no order.

        Two kinds of pulls come before the schedule's own rule. A new replica makes its first pull. An empty
        replica takes the version of lost trajectories that no replica serves; only this pull may go to an
        older version. A replica that serves the version of lost trajectories gets them before newer weights.
        Otherwise a replica could go to and fro between two versions.
        """
        resumable = self._resumable(view)
        present = {replica.version_next for replica in view.replicas} if resumable else set()
        missing = [version for version in resumable if version not in present]
        orders = []
        for replica in sorted(view.replicas, key=lambda r: r.version >= 0):
            if replica.busy:
                continue
            rescue = missing and [version for version in missing if version in view.pullable_by(replica)]
            if rescue and replica.load == 0 and replica.version not in resumable:
                missing.remove(rescue[0])
                orders.append(RefreshOrder(replica.replica_id, rescue[0]))
            elif view.newest_for(replica) > replica.version and self._takes_newest(view, replica, resumable):
                discard = self.refresh_rule.discards and replica.load > 0
                orders.append(RefreshOrder(replica.replica_id, view.newest_for(replica), discard))
        return orders

    def repack(self, view: View) -> list[RepackOrder]:
        """Trajectories to move between replicas now."""
        return [] if self.repack_rule is None else self.repack_rule.moves(view)

    def take(self, view: View) -> list[int] | None:
        """Group ids of the next batch, exactly `view.batch_groups` of them, in ascending order; None: wait.

        Waits while too few groups are ready. Also waits while an unready group must be in this batch, so that
        no group misses its deadline. Equal sets of groups are equal batches.
        """
        if view.steps_left <= 0:
            return None
        late = frozenset(self.expire(view))
        live = [group for group in view.groups if group.group_id not in late]
        ready = self.take_rule.ranked(view, [group for group in live if group.ready])
        batch = choose(view, self.staleness_max, live, ready)
        return None if batch is None else sorted(group.group_id for group in batch)

    def expire(self, view: View) -> list[int]:
        """Ids of groups that cannot be trained within the bound any more: they end as `stale`. Redundant
        groups end as `rejected`, and no later than the run."""
        if self.redundant_groups and view.steps_left <= 0:
            return [group.group_id for group in view.groups]
        return overdue(view, self.staleness_max)

    def restart(self, view: View) -> list[int]:
        """Versions of queued trajectories that no replica serves or will serve. They begin again from their
        prompts."""
        if self.mixes_versions or not view.versions_queued:
            return []
        present = {replica.version_next for replica in view.replicas}
        reachable = present.union(self._resumable(view))
        return [version for version in view.versions_queued if version not in reachable]

    def describe(self) -> dict[str, str]:
        """The five decisions, one line each."""
        return {
            "admit": self.admit_rule.describe()
            + (f"; {ahead.describe()}" if (ahead := self.ahead_rule) else ""),
            "route": self.route_rule.describe()
            + (f"; {self.pair_rule.describe()}" if self.pair_rule else ""),
            "refresh": self.refresh_rule.describe(),
            "repack": "never" if self.repack_rule is None else self.repack_rule.describe(),
            "take": self.take_rule.describe(),
        }

    def _after_pulls(self, view: View) -> list[ReplicaView]:
        """The replicas as admission needs them. A replica that pulls, gets an order to pull now, or awaits a
        version is as after its pull, and `busy` until then."""
        orders = {order.replica_id: order.version for order in self.refresh(view)}
        replicas = []
        for replica in view.replicas:
            if replica.replica_id in orders or replica.busy:
                version = orders.get(replica.replica_id, replica.version_next)
                started = 0 if version != replica.version else replica.groups_since_swap
                replica = replace(replica, version=version, busy=True, groups_since_swap=started)
            elif replica.fetching_version > replica.version and self._awaits(view, replica):
                replica = replace(replica, version=replica.fetching_version, busy=True, groups_since_swap=0)
            replicas.append(replica)
        return [replica for replica in replicas if replica.version >= 0]

    def _awaits(self, view: View, replica: ReplicaView) -> bool:
        """Whether `replica` can start nothing before the newer version that its host is about to get."""
        if replica.load > 0:
            return False
        bound = self.staleness_max
        return replica.version < 0 or (bound is not None and view.version - replica.version > bound)

    def _takes_newest(self, view: View, replica: ReplicaView, resumable: list[int]) -> bool:
        if replica.version < 0:
            return True
        if replica.load == 0 and replica.version in resumable:
            return False
        return self.refresh_rule.due(view, replica)

    def _resumable(self, view: View) -> list[int]:
        """Versions of queued trajectories that can go on with their tokens: a replica serves or can pull the
        version, and a replica that works under it is not due for newer weights at once."""
        if self.mixes_versions or not view.versions_queued:
            return []
        served = {replica.version_next for replica in view.replicas}
        return [
            version
            for version in view.versions_queued
            if version in served or version in view.pullable
            if version >= view.newest or not self.refresh_rule.due(view, ReplicaView("", version, running=1))
        ]
