"""What the controller knows of a run, and the view of the run from which decisions are made.

Synchronous, without I/O. Sessions report what happened. Only the methods here change the records.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping

from millrace.controller import episode
from millrace.controller.run_numbers import RunNumbers
from millrace.controller.state.chain import Fetch, next_fetch
from millrace.controller.state.groups import make_batch
from millrace.controller.state.relays import Relays
from millrace.controller.state.replicas import ReplicaRecord, Replicas
from millrace.controller.state.trajectories import Trajectories
from millrace.core.types import Batch, Group, Report, Trajectory
from millrace.schedule.view import View


class RunState(Trajectories):
    """The live part of a run: its trajectories, its replicas, its versions.

    `replicas` has their hosts by name."""

    def __init__(self, numbers: RunNumbers, replicas: Mapping[str, str], relays: Relays) -> None:
        super().__init__(numbers, Replicas())
        for name, host in replicas.items():
            self.join(name, host)
        self.reached = -1  # the highest group id ever trained
        self.version = 0  # of the last committed step
        self.taken: tuple[int, ...] = ()  # groups of the step under way; kept until it is committed
        self.relays = relays
        self.parked = Parked()
        self.quarantined: set[str] = set()
        self.pinned: Mapping[str, Collection[int]] = {}  # by host: versions that its relay is to get too

    def view(self) -> View:
        """The run as decisions see it."""
        version, taken, numbers = self.version + bool(self.taken), frozenset(self.taken), self.numbers
        staying, of_host = self.replicas.staying, self._of_hosts()
        return View(
            version=version,
            newest=self.relays.newest,
            pullable=self.relays.pullable(
                {record.host for record in self.replicas.values()} or set(self.relays)
            ),
            steps_left=numbers.steps - version,
            batch_groups=numbers.batch_groups,
            group_size=numbers.group_size,
            max_sequence_tokens=numbers.max_sequence_tokens,
            groups=tuple([record.view for i, record in self.groups.items() if i not in taken]),
            replicas=tuple([record.view(*of_host[record.host]) for record in staying if record.alive]),
            num_replicas=len(staying),
            versions_queued=tuple(sorted(self.versions_queued)),
            reached=max(self.reached, max(self.taken, default=-1)),
            group_duration_batches=self.measured.group_duration_batches,
            staleness=self.measured.staleness,
            screen_samples=numbers.screen_samples,
            redundant_groups=numbers.redundant_groups,
            parked=len(self.parked.ready),
            returned=self.parked.num_returned(self.groups, taken),
        )

    @property
    def versions_queued(self) -> set[int]:
        """Versions that have begun the turns of queued trajectories."""
        single = self.numbers.one_version
        versions = (episode.bound_to(t, one_version=single) for t in self.queued.values())
        return {version for version in versions if version is not None}

    def _of_hosts(self) -> dict[str, tuple[tuple[int, ...] | None, int, int]]:
        """For `ReplicaRecord.view`, by host."""
        relays, several = self.relays, len(self.relays) > 1
        return {
            host: (relay.versions if several else None, relays.fetching_version(host), relay.staging_version)
            for host, relay in relays.items()
        }

    def resume(self, version: int, reached: int, quarantined: Iterable[str]) -> None:
        """Go on from the position in the ledger."""
        self.version, self.reached = version, reached
        self.quarantined.update(quarantined)

    def join(self, name: str, host: str) -> None:
        """A replica becomes a part of the run. It serves after its first pull."""
        kv = self.numbers.slots * self.numbers.max_sequence_tokens
        self.replicas.join(ReplicaRecord(name, self.numbers.slots, kv, host))

    def replica_down(self, name: str) -> list[Trajectory]:
        """Replica `name` is gone. Returns what `lose` returns, or nothing for a replica that leaves."""
        self.replicas.down(name)
        if self.replicas[name].leaving:
            self.give_back(name)
            return []
        return self.lose(name)

    def apply(self, name: str, report: Report) -> list[Trajectory]:
        """Take in a report. Returns the trajectories that it completes."""
        self.replicas.reported(name, report.load)
        return self.progress(name, report.progress)

    def quarantine(self, row_id: str) -> None:
        """Never draw this row again."""
        self.quarantined.add(row_id)

    def next_fetch(self, host: str) -> Fetch | None:
        """What the relay of `host` gets next from other relays; None: nothing."""
        wanted, relays = self.versions_queued.union(self.pinned.get(host, ())), self.relays
        return next_fetch(
            relays.values(), host, wanted, directory=relays.directory, stored=relays.stored_versions
        )

    def take(self, group_ids: Iterable[int]) -> None:
        """These groups are the next batch. Without groups there is no batch yet."""
        self.taken = tuple(group_ids)

    def batch(self) -> Batch:
        """The batch that was taken."""
        return make_batch(self.version, [self.groups[i].group for i in self.taken])

    def reject(self, trajectory_ids: Iterable[int], reason: str) -> None:
        """The batch that was taken cannot be trained on because of these trajectories. They end. The other
        groups of the batch are ready again, unless a group has no baseline any more."""
        taken, self.taken, at_fault = self.taken, (), frozenset(trajectory_ids)
        for group_id in taken:
            self._reject(group_id, at_fault, reason)

    def committed(self, version: int) -> None:
        """The step of the batch that was taken is committed."""
        self.reached = max(self.reached, *self.taken)
        self.trained(self.taken)
        self.taken, self.version = (), version


class Parked:
    """Groups by id, the oldest first. They are not live, and their trajectories have no tokens.

    A reward worker may still be busy with a trajectory that was parked. Its answer would count for the next
    attempt, so its group is not `ready` before that answer is here.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._unanswered: set[int] = set()  # trajectories
        self._returned: set[int] = set()  # groups that have begun again

    @property
    def ready(self) -> list[Group]:
        """Those that may begin again."""
        if not self._unanswered:
            return list(self._groups.values())
        late = self._unanswered
        return [g for g in self._groups.values() if not any(m.trajectory_id in late for m in g.members)]

    def num_returned(self, live: Container[int], taken: Container[int]) -> int:
        """Of the `live` groups that are not `taken`, those that have begun again."""
        return sum(group_id in live and group_id not in taken for group_id in self._returned)

    def add(self, group: Group, unanswered: Iterable[int]) -> None:
        self._groups[group.group_id] = group
        self._unanswered.update(unanswered)
        self._returned.discard(group.group_id)

    def answered(self, trajectory_id: int) -> bool:
        """A reward worker has answered a trajectory that nobody waits for. Returns whether it was parked."""
        was_parked = trajectory_id in self._unanswered
        self._unanswered.discard(trajectory_id)
        return was_parked

    def begin_again(self, group: Group, live: Container[int]) -> None:
        del self._groups[group.group_id]
        self._returned = {group.group_id, *(i for i in self._returned if i in live)}

    def clear(self) -> list[Group]:
        """All groups; none is parked any more."""
        groups = list(self._groups.values())
        self._groups.clear()
        return groups
