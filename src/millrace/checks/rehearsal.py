"""Rehearsal: runs a schedule against random completions, pulls, crashes and failures.

Authors of a schedule use this module. `rehearse` runs a whole small training run as pure data, in
milliseconds, in an order drawn from a seed. It checks the promises on which the controller relies:

- no group is trained beyond `staleness_max`, and without faults no group ends as stale;
- a batch is exactly `batch_groups` ready groups, in order of group id;
- under a bound a group's birth never decreases;
- one trajectory holds one version unless the schedule mixes them;
- the run ends: in every state something can still happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from millrace.core.errors import MillraceError
from millrace.schedule.ahead import long_round
from millrace.schedule.schedule import Schedule
from millrace.schedule.view import GroupView, QueuedView, ReplicaView, View

PROMPT_TOKENS = 4


class BrokenPromise(MillraceError, AssertionError):
    """A schedule broke a promise on which the controller relies."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The settings of a rehearsal. Probabilities are per tick, and per replica or trajectory."""

    steps: int = 8
    batch_groups: int = 2
    group_size: int = 2
    replicas: int = 2
    slots: int = 4
    tokens_max: int = 12
    relay_versions: int = 4  # versions that the relay holds
    step_probability: float = 0.3  # that a running optimizer step ends
    pull_probability: float = 0.3  # that a running pull ends
    token_probability: float = 0.6  # that a running trajectory gets its next token
    repack_probability: float = 0.3  # that the controller looks at moves
    crash_probability: float = 0.0
    group_duration_batches: float = 2.0  # duration of a group in batches, as measured
    fail_probability: float = 0.0  # that a finished group is rejected
    ticks_max: int = 20_000


@dataclass(slots=True)
class Played:
    """The result. `staleness` is of trained groups by group id, in the order of training."""

    staleness: dict[int, int] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    stale: int = 0
    redundant: int = 0  # groups that ended so that nothing waits for them
    parked: int = 0  # groups that were left behind for a long round
    failed: int = 0
    crashes: int = 0
    moves: int = 0
    live_max: int = 0
    ticks: int = 0


@dataclass(slots=True, eq=False)
class _Member:
    length: int
    replica: str | None
    tokens: int = 0
    first: int = -1  # version of its first token
    last: int = -1

    @property
    def done(self) -> bool:
        return self.tokens >= self.length


@dataclass(slots=True)
class _Group:
    group_id: int
    birth: int
    members: list[_Member]
    ready_rank: int | None = None
    returned: bool = False  # it has begun again


@dataclass(slots=True)
class _Replica:
    replica_id: str
    version: int = -1
    pulling: int = -1
    discard: bool = False
    steps: int = 0
    groups: int = 0
    kv_previous: int = 0
    members: list[_Member] = field(default_factory=list)  # in flight here, in order of arrival


def rehearse(schedule: Schedule, scene: Scene, *, seed: int) -> Played:
    """Play `scene.steps` optimizer steps. The same arguments give the same outcome.

    Raises: BrokenPromise, which names the promise and the seed.
    """
    stage = _Stage(schedule, scene, Random(seed))
    while stage.step < scene.steps or stage.training:
        acted = stage.direct()
        if not acted and not stage.alive():
            raise BrokenPromise(
                f"{schedule.kind}: stuck before step {stage.step} (seed {seed}): {stage.view()}"
            )
        stage.tick()
        stage.outcome.ticks += 1
        if stage.outcome.ticks > scene.ticks_max:
            raise BrokenPromise(f"{schedule.kind}: no end after {scene.ticks_max} ticks (seed {seed})")
    return stage.outcome


class _Stage:
    """The world around the schedule, and a minimal controller that obeys the schedule."""

    def __init__(self, schedule: Schedule, scene: Scene, rng: Random) -> None:
        self.schedule, self.scene, self.rng = schedule, scene, rng
        self.replicas = {f"r{i}": _Replica(f"r{i}") for i in range(scene.replicas)}
        self.groups: dict[int, _Group] = {}
        self.parked: list[_Group] = []
        self.step, self.training = 0, False
        self.versions = [0]
        self.next_group_id = self.next_rank = 0
        self.outcome = Played()

    # ---- what the controller sees

    def view(self) -> View:
        versions_queued = {m.last for _, m in self._lost() if m.tokens}
        return View(
            version=self.step,
            newest=self.versions[-1],
            pullable=tuple(self.versions),
            steps_left=self.scene.steps - self.step,
            batch_groups=self.scene.batch_groups,
            group_size=self.scene.group_size,
            max_sequence_tokens=PROMPT_TOKENS + self.scene.tokens_max,
            groups=tuple(GroupView(g.group_id, g.birth, g.ready_rank) for g in self.groups.values()),
            replicas=tuple(self._replica_view(replica) for replica in self.replicas.values()),
            versions_queued=tuple(sorted(versions_queued)),
            reached=max((group_id for batch in self.outcome.batches for group_id in batch), default=-1),
            group_duration_batches=self.scene.group_duration_batches,
            redundant_groups=self.schedule.redundant_groups,
            parked=len(self.parked),
            returned=sum(group.returned for group in self.groups.values()),
        )

    def _replica_view(self, replica: _Replica) -> ReplicaView:
        members, running = replica.members, replica.members[: self.scene.slots]
        return ReplicaView(
            replica_id=replica.replica_id,
            version=replica.version,
            busy=replica.pulling >= 0,
            pulling_version=replica.pulling,
            running=len(running),
            waiting=len(members) - len(running),
            slots=self.scene.slots,
            kv_used_tokens=sum(PROMPT_TOKENS + m.tokens for m in running),
            kv_used_tokens_previous=replica.kv_previous,
            kv_capacity_tokens=self.scene.slots * (PROMPT_TOKENS + self.scene.tokens_max),
            steps_since_swap=replica.steps,
            groups_since_swap=replica.groups,
        )

    def _lost(self) -> Iterator[tuple[_Group, _Member]]:
        for group in self.groups.values():
            for member in group.members:
                if member.replica is None and not member.done:
                    yield group, member

    def alive(self) -> bool:
        """Whether anything can still happen without a decision."""
        return self.training or any(r.pulling >= 0 or r.members for r in self.replicas.values())

    # ---- one pass of the controller

    def direct(self) -> bool:
        """Ask the schedule for each decision once, and obey. Returns whether anything was done."""
        acts = [self._give_up(), self._refresh(), self._admit(), self._place(), self._repack(), self._take()]
        self.outcome.live_max = max(self.outcome.live_max, len(self.groups))
        return any(acts)

    def _give_up(self) -> bool:
        late = self.schedule.expire(self.view())
        parks = self.schedule.parks and self.step < self.scene.steps
        if parks:
            self.outcome.parked += len(late)
        elif self.schedule.redundant_groups:
            self.outcome.redundant += len(late)
        elif late and self.outcome.crashes == 0:
            raise BrokenPromise(
                f"{self.schedule.kind}: groups {late} cannot be trained in time, without any fault"
            )
        self.outcome.stale += len(late) if not self.schedule.redundant_groups else 0
        for group_id in late:
            group = self.groups.pop(group_id)
            for member in group.members:
                self._put(member, None)
            self.parked += [group] if parks else []
        gone = set(self.schedule.restart(self.view()))
        restarted = [member for _, member in self._lost() if member.tokens and member.last in gone]
        for member in restarted:
            member.tokens = 0
        return bool(late or restarted)

    def _refresh(self) -> bool:
        orders = self.schedule.refresh(self.view())
        for order in orders:
            replica = self.replicas[order.replica_id]
            self._require(order.version in self.versions, f"pull of version {order.version}, not held")
            replica.pulling, replica.discard = order.version, order.discard
        return bool(orders)

    def _admit(self) -> bool:
        view = self.view()
        replica_ids = self.schedule.admit(view)
        for replica_id in replica_ids:
            replica = self.replicas[replica_id]
            self._require(replica.version >= 0 and replica.pulling < 0, f"admission on busy {replica_id}")
            if long_round(view) and self.parked:
                self._begin_again(self.parked.pop(0), replica)
                continue
            lengths = [1 + self.rng.randrange(self.scene.tokens_max) for _ in range(self.scene.group_size)]
            members = [_Member(length, replica_id) for length in lengths]
            replica.members.extend(members)
            self.groups[self.next_group_id] = _Group(self.next_group_id, replica.version, members)
            self.next_group_id += 1
            replica.groups += 1
        limit = (self.scene.steps - self.step) * self.scene.batch_groups + self.schedule.redundant_groups
        self._require(not replica_ids or len(self.groups) <= limit, "more groups than steps left")
        return bool(replica_ids)

    def _begin_again(self, group: _Group, replica: _Replica) -> None:
        group.birth, group.ready_rank, group.returned = replica.version, None, True
        for member in group.members:
            member.tokens, member.first, member.last = 0, -1, -1
            self._put(member, replica.replica_id)
        self.groups[group.group_id] = group

    def _place(self) -> bool:
        lost = list(self._lost())
        queued = [QueuedView(member.last if member.tokens else None, group.birth) for group, member in lost]
        placed = self.schedule.place(self.view(), queued)
        for (_, member), replica_id in zip(lost, placed, strict=True):
            if replica_id is not None:
                self._put(member, replica_id)
        self._age()
        return any(placed)

    def _repack(self) -> bool:
        if not self._chance(self.scene.repack_probability):
            return False
        moves = self.schedule.repack(self.view())
        for move in moves:
            source = self.replicas[move.source]
            self._require(sum(move.shares.values()) == len(source.members), f"{move} does not empty it")
            for destination, num in move.shares.items():
                same = source.version == self.replicas[destination].version
                self._require(same, f"{move} between versions")
                for member in source.members[:num]:
                    self._put(member, destination)
        for replica in self.replicas.values():
            replica.kv_previous = self._replica_view(replica).kv_used_tokens
        self.outcome.moves += len(moves)
        return bool(moves)

    def _take(self) -> bool:
        batch = None if self.training else self.schedule.take(self.view())
        if batch is None:
            return False
        exact = len(set(batch)) == self.scene.batch_groups and batch == sorted(batch)
        self._require(exact, f"batch {batch} is not {self.scene.batch_groups} groups in order")
        bound = self.schedule.staleness_max
        for group_id in batch:
            group = self.groups.pop(group_id)
            staleness = self.step - group.birth
            self._require(group.ready_rank is not None, f"group {group_id} is not ready")
            self._require(bound is None or staleness <= bound, f"staleness {staleness} of group {group_id}")
            self.outcome.staleness[group_id] = staleness
        self.outcome.batches.append(batch)
        self.training = True
        self.step += 1
        return True

    # ---- what happens by itself

    def tick(self) -> None:
        """Let time pass: everything under way may end, in an order drawn at random."""
        if self.training and self._chance(self.scene.step_probability):
            self.training = False
            self.versions = [*self.versions, self.step][-self.scene.relay_versions :]
        for replica in self.rng.sample(list(self.replicas.values()), len(self.replicas)):
            if self._chance(self.scene.crash_probability):
                self._crash(replica)
            elif replica.pulling >= 0 and self._chance(self.scene.pull_probability):
                self._swap(replica)
            self._decode(replica)
        self._age()
        self._finish()

    def _crash(self, replica: _Replica) -> None:
        self.outcome.crashes += 1
        for member in list(replica.members):
            self._put(member, None)
            if self._chance(0.3):  # its stream was behind
                member.tokens = 0
        self.replicas[replica.replica_id] = _Replica(replica.replica_id)

    def _swap(self, replica: _Replica) -> None:
        if replica.pulling not in self.versions:
            replica.pulling = -1
            return
        if replica.discard:
            for member in replica.members:
                member.tokens = 0
        replica.version, replica.pulling = replica.pulling, -1
        replica.steps = replica.groups = 0

    def _decode(self, replica: _Replica) -> None:
        running = replica.members[: self.scene.slots]
        replica.steps += bool(running)
        for member in running:
            if self._chance(self.scene.token_probability):
                member.first = replica.version if member.tokens == 0 else member.first
                member.tokens, member.last = member.tokens + 1, replica.version
                pure = self.schedule.mixes_versions or member.first == member.last
                self._require(pure, f"one trajectory with versions {member.first} and {member.last}")
        replica.members = [member for member in replica.members if not member.done]

    def _age(self) -> None:
        for group in self.groups.values():
            versions = [m.first for m in group.members if m.tokens]
            empty = [m.replica for m in group.members if m.replica and not m.tokens]
            versions += [self.replicas[replica_id].version for replica_id in empty]
            birth = min(versions, default=group.birth)
            kept = birth >= group.birth or self.schedule.staleness_max is None
            self._require(kept, f"birth of group {group.group_id}: {group.birth} -> {birth}")
            group.birth = birth

    def _finish(self) -> None:
        for group in list(self.groups.values()):
            if group.ready_rank is not None or not all(m.done for m in group.members):
                continue
            if self._chance(self.scene.fail_probability):
                del self.groups[group.group_id]
                self.outcome.failed += 1
            else:
                group.ready_rank, self.next_rank = self.next_rank, self.next_rank + 1

    def _put(self, member: _Member, replica_id: str | None) -> None:
        if member.replica is not None and not member.done:
            self.replicas[member.replica].members.remove(member)
        if replica_id is not None:
            self.replicas[replica_id].members.append(member)
        member.replica = replica_id

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise BrokenPromise(f"{self.schedule.kind}: {otherwise} (before step {self.step})")
