"""What the controller knows: groups, trajectories, replicas, versions, and every legal transition.

Synchronous and pure of I/O: the shell tells it what happened and asks it for a `View`. Trajectories
that changed collect in `dirty` until the shell hands them to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.core.errors import DataError
from millrace.core.types import (
    Abstain,
    Batch,
    Failed,
    Finish,
    Group,
    Progress,
    Prompt,
    ReplicaLoad,
    Report,
    Sampling,
    Score,
    Scored,
    Served,
    State,
    TrainGroup,
    TrainSequence,
    Trajectory,
    Work,
)
from millrace.schedule.view import GroupView, ReplicaView, View

NO_BASELINE = "the only scored member of its group: no baseline"


class GroupRecord:
    """A live group, and what decisions see of it. `birth` never decreases; see `schedule.view`."""

    __slots__ = ("group", "view")

    def __init__(self, group: Group, birth: int) -> None:
        self.group, self.view = group, GroupView(group.group_id, birth)

    @property
    def birth(self) -> int:
        return self.view.birth

    @birth.setter
    def birth(self, birth: int) -> None:
        if birth != self.view.birth:
            self.view = GroupView(self.view.group_id, birth, self.view.ready_rank)

    @property
    def ready_rank(self) -> int | None:
        return self.view.ready_rank

    @ready_rank.setter
    def ready_rank(self, rank: int) -> None:
        self.view = GroupView(self.view.group_id, self.view.birth, rank)


@dataclass(slots=True)
class ReplicaRecord:
    """One replica. `leased` holds what it may work on, in the order of the leases."""

    name: str
    slots: int
    kv_capacity_tokens: int
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

    def view(self) -> ReplicaView:
        leased = len(self.leased)
        return ReplicaView(
            replica_id=self.name,
            version=self.version,
            busy_pulling=self.busy,
            pulling_version=self.pulling,
            running=min(leased, self.slots),
            waiting=max(0, leased - self.slots),
            slots=self.slots,
            kv_used_tokens=self.load.kv_used_tokens if leased else 0,
            kv_used_tokens_previous=self.kv_used_previous,
            kv_capacity_tokens=self.load.kv_capacity_tokens or self.kv_capacity_tokens,
            steps_since_swap=self.load.steps_since_swap,
            groups_since_swap=self.groups_since_swap,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a run that its state needs."""

    steps: int
    batch_groups: int
    group_size: int
    slots: int
    max_sequence_tokens: int
    sampling: Sampling
    seed: int
    attempts: int


class RunState:
    """The live part of a run. Terminal trajectories leave it; the ledger keeps them."""

    def __init__(self, shape: Shape, replicas: Iterable[str]) -> None:
        self.shape = shape
        kv = shape.slots * shape.max_sequence_tokens
        self.replicas = {name: ReplicaRecord(name, shape.slots, kv) for name in replicas}
        self.groups: dict[int, GroupRecord] = {}
        self.trajectories: dict[int, Trajectory] = {}
        self.queued: dict[int, Trajectory] = {}  # admitted, on no replica
        self.version = 0  # of the last committed step
        self.taken: tuple[int, ...] = ()  # groups of the step under way; kept until it is committed
        self.newest = -1
        self.held: tuple[int, ...] = ()
        self.dirty: dict[int, Trajectory] = {}
        self.ended: list[Trajectory] = []  # terminal since the shell last looked
        self.quarantined: set[str] = set()
        self._fruitless: dict[int, int] = {}  # trajectory -> leases lost without a single new token
        self._lease_start: dict[int, tuple[int, int]] = {}  # (tokens, replica's version) at the lease
        self._ready = 0  # groups that became ready, ever
        self._ready_gone = 0  # of them, those that were trained or ended

    # ------------------------------------------------------------ looking

    def view(self) -> View:
        """The run as decisions see it."""
        orphans = {trajectory.versions[-1] for trajectory in self.queued.values() if trajectory.versions}
        version, taken = self.version + bool(self.taken), frozenset(self.taken)
        return View(
            version=version,
            newest=self.newest,
            held=self.held,
            steps_left=self.shape.steps - version,
            batch_groups=self.shape.batch_groups,
            group_size=self.shape.group_size,
            max_sequence_tokens=self.shape.max_sequence_tokens,
            groups=tuple([record.view for i, record in self.groups.items() if i not in taken]),
            replicas=tuple(r.view() for r in self.replicas.values() if r.alive),
            orphans=tuple(sorted(orphans)),
        )

    @property
    def num_ready(self) -> int:
        """Groups that could be trained on: while fewer than a batch, a look at which is not worth it."""
        return self._ready - self._ready_gone

    # ------------------------------------------------------------ admission and leases

    def admit(self, prompt: Prompt, replica: str) -> tuple[Group, list[Work]]:
        """A new group, all of it leased to `replica`."""
        first = prompt.group_id * self.shape.group_size
        members = [Trajectory(first + k, prompt.group_id) for k in range(self.shape.group_size)]
        group = Group(prompt.group_id, prompt.row_id, prompt.tokens, prompt.text, members)
        record = self.replicas[replica]
        self.groups[group.group_id] = GroupRecord(group, birth=record.version)
        record.groups_since_swap += 1
        for member in members:
            self.trajectories[member.trajectory_id] = member
            self.queued[member.trajectory_id] = member
        return group, [self.lease(member, replica) for member in members]

    def adopt(self, group: Group) -> list[Trajectory]:
        """A live group found in the ledger. Returns its members that still need a score."""
        born = [m.versions[0] for m in group.members if m.versions]
        self.groups[group.group_id] = GroupRecord(group, birth=min(born, default=self.version))
        unscored = []
        for member in group.members:
            if not member.live:
                continue
            self.trajectories[member.trajectory_id] = member
            if member.state is State.QUEUED:
                self.queued[member.trajectory_id] = member
            elif member.state is State.GENERATED:
                unscored.append(member)
        self._settle(group.group_id)
        return unscored

    def lease(self, trajectory: Trajectory, replica: str) -> Work:
        """Let `replica` work on a queued trajectory, from the tokens it has."""
        record, tid = self.replicas[replica], trajectory.trajectory_id
        del self.queued[tid]
        trajectory.state, trajectory.replica, trajectory.epoch = State.LEASED, replica, record.epoch
        trajectory.lease += 1
        record.leased[tid] = trajectory
        self._lease_start[tid] = len(trajectory.tokens), record.version
        self.dirty[tid] = trajectory
        owner = self.groups[trajectory.group_id]
        self._recompute_birth(owner)
        return Work(
            tid,
            trajectory.group_id,
            trajectory.lease,
            owner.group.prompt,
            list(trajectory.tokens),
            self.shape.sampling,
            self.shape.seed,
        )

    def unlease(self, trajectory: Trajectory) -> None:
        """Take a trajectory back from its replica; it keeps its partial tokens."""
        self.replicas[trajectory.replica].leased.pop(trajectory.trajectory_id)
        trajectory.state = State.QUEUED
        self.queued[trajectory.trajectory_id] = trajectory
        self.dirty[trajectory.trajectory_id] = trajectory

    def restart(self, trajectory: Trajectory) -> int:
        """Forget a queued trajectory's partial tokens (its noise stays). Returns how many."""
        discarded = len(trajectory.tokens)
        trajectory.tokens, trajectory.logprobs, trajectory.versions = [], [], []
        self.dirty[trajectory.trajectory_id] = trajectory
        return discarded

    def _recompute_birth(self, record: GroupRecord) -> None:
        """Oldest version among the members' tokens, or that their replica served at the lease: tokens
        sampled before a swap can be reported after it. It never falls, so one member that old settles it."""
        birth, births = record.birth, []
        for member in record.group.members:
            if member.versions:
                born = member.versions[0]
            elif member.state is State.LEASED:
                born = self._lease_start[member.trajectory_id][1]
            elif member.state is State.QUEUED:
                return
            else:
                continue
            if born <= birth:
                return
            births.append(born)
        record.birth = min(births, default=birth)

    # ------------------------------------------------------------ what replicas tell

    def replica_up(self, name: str, epoch: int) -> None:
        record = self.replicas[name]
        record.alive, record.epoch, record.version = True, epoch, -1
        record.load, record.kv_used_previous, record.groups_since_swap = ReplicaLoad(version=-1), 0, 0

    def replica_down(self, name: str) -> list[Trajectory]:
        """The replica is gone: its trajectories wait for another. Returns those abandoned because
        `attempts` leases in a row were lost without a single new token: their prompt is suspect."""
        record = self.replicas[name]
        record.alive, record.version, record.pulling = False, -1, -1
        record.moves.clear()
        poisoned = []
        for trajectory in list(record.leased.values()):
            tid = trajectory.trajectory_id
            fruitless = len(trajectory.tokens) == self._lease_start[tid][0]
            self._fruitless[tid] = self._fruitless.get(tid, 0) + 1 if fruitless else 0
            self.unlease(trajectory)
            if self._fruitless[tid] >= self.shape.attempts:
                poisoned.append(trajectory)
        return poisoned

    def begin_move(self, source: str, destinations: Iterable[str]) -> None:
        """From here on all of them are busy, until every move that they are part of has ended."""
        for name in (source, *destinations):
            self.replicas[name].moves.add(source)

    def end_move(self, source: str, destinations: Iterable[str]) -> list[str]:
        """Returns the destinations that are still as they were when the move began: alive without a break,
        serving that version, and not about to pull another. Once it has ended there are none."""
        held = [name for name in destinations if source in self.replicas[name].moves]
        for name in (source, *held):
            self.replicas[name].moves.discard(source)
        return held

    def served(self, name: str, served: Served) -> None:
        """The replica computes with another version now."""
        record = self.replicas[name]
        record.version, record.groups_since_swap = served.version, 0

    def apply(self, name: str, report: Report) -> list[Trajectory]:
        """Take in a report. Returns the trajectories that it completes."""
        self.replicas[name].load = report.load
        return self.progress(name, report.progress)

    def progress(self, name: str, parts: Iterable[Progress]) -> list[Trajectory]:
        """Append new tokens; what is known already, or belongs to another lease, changes nothing.

        Raises: DataError on a gap, which a lossless stream cannot have.
        """
        leased, finished = self.replicas[name].leased, []
        for part in parts:
            trajectory = leased.get(part.trajectory_id)
            if trajectory is None or part.lease != trajectory.lease:
                continue
            known = len(trajectory.tokens) - part.start
            if known < 0:
                raise DataError(
                    f"trajectory {part.trajectory_id}: {name} reports tokens from {part.start}, "
                    f"but only {len(trajectory.tokens)} are known: {-known} are missing"
                )
            fresh, first = part.tokens[known:], not trajectory.tokens
            trajectory.tokens += fresh
            trajectory.logprobs += part.logprobs[known:]
            trajectory.versions += [part.version] * len(fresh)
            self.dirty[part.trajectory_id] = trajectory
            if first and fresh:
                self._recompute_birth(self.groups[trajectory.group_id])
            if part.finish is not None:
                self._complete(trajectory, part.finish)
                finished.append(trajectory)
        return finished

    def _complete(self, trajectory: Trajectory, finish: Finish) -> None:
        trajectory.state, trajectory.finish = State.GENERATED, finish
        self.replicas[trajectory.replica].leased.pop(trajectory.trajectory_id)

    # ------------------------------------------------------------ scores and ends

    def score(self, trajectory_id: int, score: Score) -> Trajectory | None:
        """A reward is known. None: nobody waits for it any more."""
        trajectory = self.trajectories.get(trajectory_id)
        if trajectory is None or trajectory.state is not State.GENERATED:
            return None
        match score:
            case Scored(value, metrics):
                trajectory.state, trajectory.reward, trajectory.metrics = State.SCORED, value, metrics
                self.dirty[trajectory_id] = trajectory
                self._settle(trajectory.group_id)
            case Failed(reason):
                self.end(trajectory, State.FAILED, reason)
            case Abstain(reason):
                self.end(trajectory, State.REJECTED, reason)
        return trajectory

    def end(self, trajectory: Trajectory, state: State, reason: str) -> None:
        """A live trajectory ends without being trained on."""
        self._end(trajectory, state, reason)
        self._settle(trajectory.group_id)

    def _end(self, trajectory: Trajectory, state: State, reason: str) -> None:
        tid = trajectory.trajectory_id
        if trajectory.state is State.LEASED:
            self.replicas[trajectory.replica].leased.pop(tid)
        trajectory.state, trajectory.reason = state, reason
        self.dirty[tid] = trajectory
        self.ended.append(trajectory)
        self._forget(tid)

    def end_group(self, group_id: int, state: State, reason: str) -> None:
        """All of it at once: the last members are no group of their own in between."""
        record = self.groups.pop(group_id)
        self._ready_gone += record.ready_rank is not None
        for member in record.group.members:
            if member.live:
                self._end(member, state, reason)

    def _forget(self, tid: int) -> None:
        self.trajectories.pop(tid, None)
        self.queued.pop(tid, None)
        self._fruitless.pop(tid, None)
        self._lease_start.pop(tid, None)

    def _settle(self, group_id: int) -> None:
        """A group with nothing left to wait for becomes ready, or ends if it has no baseline."""
        record = self.groups.get(group_id)
        if record is None or record.ready_rank is not None:
            return
        live = [m for m in record.group.members if m.live]
        if any(m.state not in (State.SCORED, State.BUFFERED) for m in live):
            return
        if len(live) == 1:
            self.end(live[0], State.REJECTED, NO_BASELINE)
        elif not live:
            del self.groups[group_id]
        else:
            for member in live:
                member.state = State.BUFFERED
                self.dirty[member.trajectory_id] = member
            record.ready_rank, self._ready = self._ready, self._ready + 1

    # ------------------------------------------------------------ training

    def batch(self) -> Batch:
        """The batch that was taken."""
        return make_batch(self.version, [self.groups[i].group for i in self.taken])

    def reject(self, trajectory_ids: Iterable[int], reason: str) -> None:
        """The batch that was taken cannot be trained on because of these. They end; what is left of it is
        ready again, but for groups that have no baseline any more."""
        taken, self.taken = self.taken, ()
        at_fault = set(trajectory_ids)
        for group_id in taken:
            live = [m for m in self.groups[group_id].group.members if m.live]
            named = [m for m in live if m.trajectory_id in at_fault]
            for member in named:
                self._end(member, State.REJECTED, reason)
            if named and len(live) - len(named) < 2:
                self.end_group(group_id, State.REJECTED, NO_BASELINE)

    def committed(self, version: int) -> None:
        """The step of the batch that was taken is committed."""
        for group_id in self.taken:
            for member in self.groups.pop(group_id).group.members:
                self._forget(member.trajectory_id)
        self._ready_gone += len(self.taken)
        self.taken, self.version = (), version


def make_batch(version: int, groups: Iterable[Group]) -> Batch:
    """What the trainer gets to go from `version` to `version + 1`: the scored members."""
    return Batch(version, [TrainGroup(g.group_id, g.prompt, _sequences(g)) for g in groups])


def _sequences(group: Group) -> list[TrainSequence]:
    return [
        TrainSequence(
            trajectory_id=m.trajectory_id,
            tokens=m.tokens,
            logprobs=m.logprobs,
            versions=m.versions,
            mask=[True] * len(m.tokens),
            reward=m.reward,
            truncated=m.finish is Finish.LENGTH,
        )
        for m in group.members
        if m.state in (State.BUFFERED, State.TRAINED) and m.reward is not None
    ]
