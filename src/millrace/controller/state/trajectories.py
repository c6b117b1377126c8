"""Trajectories and their groups: every legal transition of them.

Synchronous, without I/O. Changed trajectories collect in `dirty`, trajectories that only have new tokens in
`grown`, and ended ones also in `ended`, until the sessions hand them to the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from millrace.controller import episode
from millrace.controller.run_numbers import RunNumbers
from millrace.controller.state.groups import GroupRecord, members_of
from millrace.controller.state.replicas import Replicas
from millrace.core.rounding import all_equal
from millrace.core.turns.turn_bounds import EpisodeBounds
from millrace.core.types import (
    LIVE,
    Abstain,
    Failed,
    Finish,
    Group,
    Observed,
    Progress,
    Prompt,
    Score,
    Scored,
    ScoreRequest,
    State,
    Trajectory,
    Work,
)
from millrace.schedule.admit import refuse_endless, screened_reward
from millrace.schedule.lengths import PastLengths
from millrace.schedule.view import QueuedView

NO_BASELINE = "the only scored member of its group: no baseline"
REDUNDANT = "redundant: its group is complete without it"
NO_SIGNAL = "all rewards of its group are equal: another group takes its place"


class Trajectories:
    """The live trajectories. A trajectory that ends leaves this record; the ledger has it."""

    def __init__(self, numbers: RunNumbers, replicas: Replicas) -> None:
        self.numbers, self.replicas = numbers, replicas
        self.groups: dict[int, GroupRecord] = {}
        self.measured = RunAverages()
        self.trajectories: dict[int, Trajectory] = {}
        self.queued: dict[int, Trajectory] = {}  # admitted, on no replica
        self.beginning: list[Trajectory] = []  # their episodes are to begin; until requested
        self.dirty: dict[int, Trajectory] = {}
        self.grown: dict[int, Trajectory] = {}
        self.ended: list[Trajectory] = []  # since the shell last looked
        self.cut: list[tuple[int, str]] = []  # ended under a lease, with its replica; until stopped
        self.resampled = 0  # groups without signal that were replaced since the last step
        self.unreplaced = 0  # groups without signal that are trained, because the limit was reached
        self.screened = Counter[str]()  # groups that were screened out since the last step
        self._screened_in_a_row = 0
        self._fruitless: dict[int, int] = {}  # trajectory -> leases lost without a single new token
        self._lease_start: dict[int, tuple[int, int]] = {}  # (tokens, replica's version) at the lease
        self._ready = 0  # groups that became ready, ever
        self._ready_gone = 0  # groups that became ready and then were trained or ended

    @property
    def num_ready(self) -> int:
        """Groups that could be trained on. With fewer than a batch, `take` has nothing to decide."""
        return self._ready - self._ready_gone

    def changes(self) -> tuple[list[Trajectory], list[Trajectory], list[Trajectory]]:
        """Trajectories that changed, that only have new tokens, and that ended, since the last call."""
        changed, grown = list(self.dirty.values()), [t for i, t in self.grown.items() if i not in self.dirty]
        ended, self.ended = self.ended, []
        self.dirty.clear()
        self.grown.clear()
        return changed, grown, ended

    # ------------------------------------------------------------ admission and leases

    def admit(self, prompt: Prompt, replica: str, *, now_s: float) -> tuple[Group, list[Work]]:
        """A new group, with its members leased to `replica`, except those that are held back, or that wait
        for a prompt of their own. The episode of the first member has begun with the group's prompt."""
        ids = members_of(prompt.group_id, self.numbers.group_size)
        members = [Trajectory(tid, prompt.group_id, bounds=EpisodeBounds(prompt.bounds)) for tid in ids]
        group = Group(prompt.group_id, prompt.row_id, prompt.tokens, prompt.text, members, prompt.row_digest)
        record, samples = self.replicas[replica], self.numbers.screen_samples
        owner = self.groups[group.group_id] = GroupRecord(group, record.version, samples, now_s)
        record.groups_since_swap += 1
        self.trajectories |= {member.trajectory_id: member for member in members}
        num_begun = 1 if self.numbers.own_prompts else len(members)
        self.queued |= {member.trajectory_id: member for member in owner.started[:num_begun]}
        for member in owner.started[num_begun:]:
            member.replica, member.epoch = replica, record.epoch  # where the group's keys and values are
            self._begin(member)
        return group, [self.lease(member, replica) for member in owner.started[:num_begun]]

    def adopt(self, group: Group, *, birth: int) -> list[Trajectory]:
        """Take over a live group from the ledger; its birth is `birth` if it has no token. Returns the
        members that still need a score."""
        firsts = [m.columns.version_first for m in group.members]
        birth = min((version for version in firsts if version is not None), default=birth)
        owner = self.groups[group.group_id] = GroupRecord(group, birth, self.numbers.screen_samples)
        self.trajectories |= {m.trajectory_id: m for m in group.members if m.live}
        self._start([m for m in owner.started if m.state is State.QUEUED])
        self._settle_group(group.group_id)
        asked = frozenset(m.trajectory_id for m in self.beginning)
        return [m for m in group.members if m.state in episode.UNANSWERED and m.trajectory_id not in asked]

    def _start(self, members: Iterable[Trajectory]) -> None:
        """These members may be leased. One whose episode is to begin first has no sampled token."""
        for member in members:
            if self.numbers.own_prompts and member.columns.version_first is None:
                self._begin(member)
            else:
                self.queued[member.trajectory_id] = member

    def _begin(self, trajectory: Trajectory) -> None:
        episode.begin(trajectory)
        self.queued.pop(trajectory.trajectory_id, None)
        self.dirty[trajectory.trajectory_id] = trajectory
        self.beginning.append(trajectory)

    def take_beginning(self) -> list[Trajectory]:
        """The trajectories whose episodes are to begin, each once. Some may have ended meanwhile."""
        beginning, self.beginning = self.beginning, []
        return [one for one in beginning if self.trajectories.get(one.trajectory_id) is one]

    def lease(self, trajectory: Trajectory, replica: str) -> Work:
        """Let `replica` work on a queued trajectory, from its present tokens on."""
        record, tid = self.replicas[replica], trajectory.trajectory_id
        del self.queued[tid]
        trajectory.state, trajectory.replica, trajectory.epoch = State.LEASED, replica, record.epoch
        trajectory.lease += 1
        record.leased[tid] = trajectory
        self._lease_start[tid] = len(trajectory.columns), record.version
        self.dirty[tid] = trajectory
        owner = self.groups[trajectory.group_id]
        self._recompute_birth(owner)
        return episode.work(trajectory, owner.group.prompt, *self.numbers.of_lease)

    def queued_view(self, trajectory: Trajectory) -> QueuedView:
        """A queued trajectory as the schedule sees it."""
        birth = self.groups[trajectory.group_id].birth
        return episode.queued_view(trajectory, birth, self.replicas, one_version=self.numbers.one_version)

    def unlease(self, trajectory: Trajectory) -> None:
        """Take a trajectory back from its replica, with its partial tokens."""
        self.replicas[trajectory.replica].leased.pop(trajectory.trajectory_id)
        trajectory.state = State.QUEUED
        self.queued[trajectory.trajectory_id] = trajectory
        self.dirty[trajectory.trajectory_id] = trajectory

    def restart(self, trajectory: Trajectory) -> tuple[int, bool]:
        """Drop the tokens of a queued trajectory's present turn, or of all turns where these have one
        version. Its random seed stays. Returns how many tokens, and whether its episode begins again."""
        self.dirty[trajectory.trajectory_id] = trajectory
        was_first = episode.in_first_turn(trajectory)
        num_tokens = episode.restart(trajectory, one_version=self.numbers.one_version)
        again = not was_first and episode.in_first_turn(trajectory)
        if again and self.numbers.own_prompts:
            self._begin(trajectory)
        return num_tokens, again

    def lose(self, name: str) -> list[Trajectory]:
        """Replica `name` is gone: its trajectories are queued again. Returns the trajectories whose prompt is
        suspect: `attempts` leases in a row were lost without a new token. A trajectory that waited for a slot
        cannot have caused the death."""
        poisoned, record = [], self.replicas[name]
        for position, trajectory in enumerate(list(record.leased.values())):
            tid = trajectory.trajectory_id
            fruitless = len(trajectory.columns) == self._lease_start[tid][0]
            if not fruitless:
                self._fruitless.pop(tid, None)
            elif position < record.slots:
                self._fruitless[tid] = self._fruitless.get(tid, 0) + 1
            self.unlease(trajectory)
            if self._fruitless.get(tid, 0) >= self.numbers.attempts:
                poisoned.append(trajectory)
        return poisoned

    def give_back(self, name: str) -> None:
        """Replica `name` leaves: its trajectories are queued again, and none becomes suspect."""
        for trajectory in list(self.replicas[name].leased.values()):
            self.unlease(trajectory)

    def _recompute_birth(self, record: GroupRecord) -> None:
        """The oldest version among the members' tokens. For a member without tokens, the version that its
        replica served at the lease: tokens sampled before a swap can be reported after it. The birth never
        falls, so the first member with that version ends the search."""
        birth, births = record.birth, []
        for member in record.started:
            if (first := member.columns.version_first) is not None:
                version = first
            elif member.state is State.LEASED:
                version = self._lease_start[member.trajectory_id][1]
            elif member.state in (State.QUEUED, State.WAITING):
                return
            else:
                continue
            if version <= birth:
                return
            births.append(version)
        record.birth = min(births, default=birth)

    # ------------------------------------------------------------ tokens

    def progress(self, name: str, reported: Iterable[Progress]) -> list[Trajectory]:
        """Append new tokens. Tokens that are here already, or belong to another lease, change nothing.
        Returns the trajectories whose generation ended.

        Raises: DataError: a gap.
        """
        leased, finished = self.replicas[name].leased, []
        for one in reported:
            trajectory = leased.get(one.trajectory_id)
            if trajectory is None or one.lease != trajectory.lease:
                continue
            prompt_end = trajectory.columns.prompt_end
            was_empty = len(trajectory.columns) == prompt_end
            episode.extend(trajectory, one, name)
            self.grown[one.trajectory_id] = trajectory
            if was_empty and len(trajectory.columns) > prompt_end:
                self._recompute_birth(self.groups[trajectory.group_id])
            if one.finish is not None:
                self._complete(trajectory, one.finish)
                finished.append(trajectory)
        return finished

    def _complete(self, trajectory: Trajectory, finish: Finish) -> None:
        episode.end_turn(trajectory, finish, answered=self.numbers.episode_tokens > 0)
        self.dirty[trajectory.trajectory_id] = trajectory
        self.replicas[trajectory.replica].leased.pop(trajectory.trajectory_id)

    # ------------------------------------------------------------ scores and ends

    def score_request(self, trajectory: Trajectory) -> ScoreRequest:
        group, most = self.groups[trajectory.group_id].group, self.numbers.max_sequence_tokens
        return episode.request(trajectory, group.prompt, group.row_digest, max_sequence_tokens=most)

    def score(self, trajectory_id: int, score: Score | Observed) -> Trajectory | None:
        """Record a score or an observation. Returns its trajectory; None: the trajectory waits for neither
        any more."""
        trajectory = self.trajectories.get(trajectory_id)
        if trajectory is None or trajectory.state not in episode.UNANSWERED:
            return None
        self.dirty[trajectory_id] = trajectory
        match score:
            case Observed():
                episode.observe(trajectory, score)
                self.queued[trajectory_id] = trajectory
            case Scored():
                episode.end_episode(trajectory, score)
                self._settle_group(trajectory.group_id)
            case Failed(reason):
                self.end(trajectory, State.FAILED, reason)
            case Abstain(reason):
                self.end(trajectory, State.REJECTED, reason)
        return trajectory

    def num_tokens(self, trajectory_id: int) -> int:
        """Of a trajectory, so far. 0: it is not live."""
        trajectory = self.trajectories.get(trajectory_id)
        return 0 if trajectory is None else len(trajectory.columns)

    def measure_group(self, group_id: int, now_s: float) -> None:
        """Note how long a group took that has just become ready."""
        record = self.groups[group_id]
        lengths = [len(m.columns) for m in record.group.members if m.live]
        self.measured.lengths.learn(record.group.row_id, lengths)
        if record.started_s is not None:
            self.measured.group.add(now_s - record.started_s)

    def end(self, trajectory: Trajectory, state: State, reason: str) -> None:
        """A live trajectory ends without being trained on."""
        self._end(trajectory, state, reason)
        self._settle_group(trajectory.group_id)

    def _end(self, trajectory: Trajectory, state: State, reason: str) -> None:
        tid = trajectory.trajectory_id
        if trajectory.state is State.LEASED:
            self.replicas[trajectory.replica].leased.pop(tid)
            self.cut.append((tid, trajectory.replica))
        trajectory.state, trajectory.reason = state, reason
        self.dirty[tid] = trajectory
        self.ended.append(trajectory)
        self._forget(tid)

    def end_group(self, group_id: int, state: State, reason: str) -> None:
        """End all live members at once, so that the last ones never count as a group of their own."""
        for member in self.remove(group_id).members:
            if member.live:
                self._end(member, state, reason)

    def remove(self, group_id: int) -> Group:
        """The group is not live any more. Returns it."""
        record = self.groups.pop(group_id)
        self._ready_gone += record.ready_rank is not None
        return record.group

    def _forget(self, tid: int) -> None:
        self.trajectories.pop(tid, None)
        self.queued.pop(tid, None)
        self._fruitless.pop(tid, None)
        self._lease_start.pop(tid, None)

    def _settle_group(self, group_id: int) -> None:
        """A group whose live members all have scores becomes ready, without redundant ones. It ends if it has
        no baseline or signal."""
        record = self.groups.get(group_id)
        if record is None or record.ready_rank is not None:
            return
        live = [m for m in record.started if m.state in LIVE]
        unscored = [m for m in live if m.state not in (State.SCORED, State.BUFFERED)]
        if unscored and len(live) - len(unscored) < self.numbers.samples:
            return
        for member in unscored:
            self._end(member, State.REJECTED, REDUNDANT)
        live = [m for m in live if m.state in LIVE] if unscored else live
        if record.unstarted:
            self._screen(record, [m.reward for m in live if m.reward is not None])
        elif len(live) == 1:
            self.end(live[0], State.REJECTED, NO_BASELINE)
        elif not live:
            del self.groups[group_id]
        elif self._replaces(live):
            self.end_group(group_id, State.REJECTED, NO_SIGNAL)
        else:
            for member in live:
                member.state = State.BUFFERED
                self.dirty[member.trajectory_id] = member
            record.ready_rank, self._ready = self._ready, self._ready + 1

    def _screen(self, record: GroupRecord, rewards: list[float]) -> None:
        """The rest of a group starts, or the group ends as screened out."""
        reward = screened_reward(rewards)
        if reward is None:
            self._start(record.unstarted)
            record.unstarted, self._screened_in_a_row = [], 0
            return
        why = f"screened out: its first {len(rewards)} rewards are {reward:g}"
        self.end_group(record.group.group_id, State.REJECTED, why)
        self.screened["solved" if reward > 0 else "hopeless"] += 1
        self._screened_in_a_row += 1
        refuse_endless(self._screened_in_a_row, record.group.row_id, why)

    def _replaces(self, scored: list[Trajectory]) -> bool:
        """DAPO's dynamic sampling (arXiv:2503.14476, equation 11): if all rewards of a group are equal, all
        its advantages are 0. The group teaches nothing, so it ends, and admission starts another one in its
        place.
        """
        if not (limit := self.numbers.resampled_max) or not all_equal(m.reward or 0.0 for m in scored):
            return False
        replaces = self.resampled < limit
        self.resampled, self.unreplaced = self.resampled + replaces, self.unreplaced + (not replaces)
        return replaces

    def _reject(self, group_id: int, at_fault: Container[int], reason: str) -> None:
        """Members that cannot be trained on end. The others stay ready unless they have no baseline."""
        live = [m for m in self.groups[group_id].group.members if m.live]
        named = [m for m in live if m.trajectory_id in at_fault]
        for member in named:
            self._end(member, State.REJECTED, reason)
        if named and len(live) - len(named) < 2:
            self.end_group(group_id, State.REJECTED, NO_BASELINE)

    def trained(self, group_ids: Iterable[int]) -> None:
        """The step that took these groups is committed."""
        for group_id in group_ids:
            for member in self.remove(group_id).members:
                self._forget(member.trajectory_id)
        self.resampled = self.unreplaced = 0


MEMORY = 64
"""Durations that make up most of a mean. Lengths drift as a model learns, so older durations fade."""

BATCHES = 16
"""The same for the staleness of batches, which follows the schedule's decisions."""

FILLING = 8
"""The first batches of a run, or after a resume, are young under any schedule. They do not count."""


class Mean:
    """The mean of all observations at first, and later of about the last `memory`."""

    __slots__ = ("_count", "_memory", "value")

    def __init__(self, memory: int = MEMORY) -> None:
        self.value: float | None = None
        self._count, self._memory = 0, memory

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, self._memory)
        mean = self.value or 0.0
        self.value = mean + (value - mean) / self._count


class RunAverages:
    """`group`: seconds of a group from its start until it is ready. `step`: seconds of the trainer from one
    batch until it could take the next. The staleness of trained tokens, in versions. `lengths`: of rows."""

    def __init__(self) -> None:
        self.group, self.step, self._staleness = Mean(), Mean(), Mean(BATCHES)
        self.lengths, self._batches = PastLengths(), 0

    def batch_trained(self, staleness: float) -> None:
        self._batches += 1
        if self._batches > FILLING:
            self._staleness.add(staleness)

    @property
    def group_duration_batches(self) -> float:
        """Batches that a trainer without waits trains while one group is generated; 1 while unknown."""
        return self.group.value / self.step.value if self.group.value and self.step.value else 1.0

    @property
    def staleness(self) -> float | None:
        """None: too few batches were trained."""
        return self._staleness.value
