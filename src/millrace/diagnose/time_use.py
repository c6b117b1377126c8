"""How each role spent its time over the last steps, from the events of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from millrace.core.events import Event

Period = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A period in which nothing changed. `waits`: the trainer waited for a batch. `scoring`: complete turns
    that waited for a reward or an answer."""

    start_s: float
    end_s: float
    waits: bool
    scoring: int

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


class Moments:
    """The moments of one period, in order and without gaps."""

    def __init__(self, period: Period, waits: Iterable[Period], scoring: Iterable[tuple[float, int]]) -> None:
        """`waits` are the trainer's waits, which do not overlap. `scoring` is each change of the number of
        turns that wait for a reward: when, and by how many."""
        changes = [(at, 0, by) for at, by in scoring]
        changes += [(start, 1, 0) for start, _ in waits] + [(end, -1, 0) for _, end in waits]
        self._moments = list(_between(period, sorted(changes)))
        self._starts = [moment.start_s for moment in self._moments]

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._moments)

    def within(self, period: Period) -> Iterator[tuple[Moment, float]]:
        """Each moment that overlaps `period`, with the seconds of the overlap."""
        start, end = period
        for moment in self._moments[max(0, bisect_right(self._starts, start) - 1) :]:
            if moment.start_s >= end:
                return
            if (both := min(end, moment.end_s) - max(start, moment.start_s)) > 0:
                yield moment, both


def _between(period: Period, changes: Sequence[tuple[float, int, int]]) -> Iterator[Moment]:
    """Moments end where a change makes a difference."""
    start, end = period
    waiting = scoring = 0
    for at, waits, scores in changes:
        if start < at < end and (waits or scores):
            yield Moment(start, at, waiting > 0, max(0, scoring))
            start = at
        waiting, scoring = waiting + waits, scoring + scores
    if end > start:
        yield Moment(start, end, waiting > 0, max(0, scoring))


STEPS_MAX = 64
"""The last steps that count."""
WARM_UP_STEPS = 5
"""The first steps of a longer run do not count: the pipeline fills, and caches are cold."""
REPORTS_MAX = 4_000
"""Of each replica, the newest that are kept."""

COMPUTING, BATCH, PUBLISHING, CHECKPOINT = "computing", "waiting for a batch", "publishing", "checkpoint"
DECODING, BOUND, REWARDS = "decoding", "paused by the schedule", "waiting for rewards"
WEIGHTS, TAIL, NO_WORK = "swapping weights", "waiting for the longest completions", "without work"
SCORING, IDLE, OTHER = "busy", "idle", "other"

KINDS = (
    *("run_started", "step", "published", "checkpoint", "report", "pulled"),
    *("beginning", "finished", "observed", "scored", "ended", "restarted", "memory"),
)
"""Kinds of the events that count."""

Seconds = dict[str, float]


@dataclass(frozen=True, slots=True)
class TimeUse:
    """The time between two steps, of each role by cause. A role's seconds add up to its time in that period.

    `waits` are the causes of the trainer's waits: what the replicas did meanwhile. `scoring` is the mean
    number of complete turns that wait for a reward; with `slots` per replica `running` are in use while it
    decodes. None: not recorded.
    """

    steps: int = 0
    took_s: float = 0.0
    trainer: Seconds = field(default_factory=dict)
    replicas: dict[str, Seconds] = field(default_factory=dict)
    rewards: Seconds = field(default_factory=dict)
    waits: Seconds = field(default_factory=dict)
    running: float | None = None
    scoring: float | None = None
    controller: float | None = None  # the share of one core

    @property
    def steps_per_s(self) -> float | None:
        return self.steps / self.took_s if self.took_s > 0 else None

    @property
    def roles(self) -> dict[str, Seconds]:
        """All roles with seconds, by their names."""
        named = {"trainer": self.trainer} | self.replicas | {"reward workers": self.rewards}
        return {name: seconds for name, seconds in named.items() if seconds}

    def replica_share(self, cause: str) -> float:
        """Of the time of all replicas."""
        total_s = sum(sum(seconds.values()) for seconds in self.replicas.values())
        return sum(seconds.get(cause, 0.0) for seconds in self.replicas.values()) / max(total_s, 1e-9)


def share(seconds: Seconds, cause: str) -> float:
    return seconds.get(cause, 0.0) / max(sum(seconds.values()), 1e-9)


@dataclass(frozen=True, slots=True)
class _Load:
    at_s: float
    busy_s: float
    idle_s: float
    running: int


class TimeUseLog:
    """A sink: what `use` needs of the last steps of the newest session. `workers` score at the same time.

    `began_late`: the first event was not that of a session, so earlier steps of it are not known.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self.began_late = workers, True
        self._begin()

    def _begin(self) -> None:
        """Times of another session are of another clock."""
        self._num_steps = 0
        self._steps: deque[tuple[float, Seconds]] = deque(maxlen=STEPS_MAX + 1)
        self._stalls: deque[tuple[float, str, float]] = deque(maxlen=4 * STEPS_MAX)
        self._loads: dict[str, deque[_Load]] = {}
        self._swaps: dict[str, deque[tuple[float, float]]] = {}
        self._scoring: deque[tuple[float, int]] = deque()
        self._pending: set[int] = set()
        self._cpu: deque[tuple[float, float]] = deque(maxlen=REPORTS_MAX)

    def __call__(self, event: Event) -> None:
        fields, at_s = event.fields, event.time_s
        match event.kind:
            case "run_started":
                self.began_late = False
                self._begin()
            case "step" if not fields.get("replayed"):
                self._step(at_s, fields)
            case "published":
                self._stalls.append((at_s, PUBLISHING, fields["stall_s"]))
            case "checkpoint":
                self._stalls.append((at_s, CHECKPOINT, fields.get("stall_s", fields["save_s"])))
            case "report":
                load = _Load(at_s, fields["busy_s"], fields["idle_s"], fields["running"])
                self._loads.setdefault(fields["replica"], deque(maxlen=REPORTS_MAX)).append(load)
            case "pulled":
                swaps = self._swaps.setdefault(fields["replica"], deque(maxlen=REPORTS_MAX))
                swaps.append((at_s, fields["swap_s"]))
            case "finished" if (tid := fields["trajectory_id"]) not in self._pending:
                self._pending.add(tid)
                self._scoring.append((at_s, 1))
            case "beginning":
                for tid in set(fields["trajectory_ids"]) - self._pending:
                    self._pending.add(tid)
                    self._scoring.append((at_s, 1))
            case "observed" | "scored" | "ended" | "restarted":
                self._answered(fields["trajectory_id"], at_s)
            case "memory" if "controller_cpu_s" in fields:
                self._cpu.append((at_s, fields["controller_cpu_s"]))

    def _step(self, at_s: float, fields: dict[str, Any]) -> None:
        self._num_steps += 1
        self._steps.append((at_s, {COMPUTING: fields["step_s"], BATCH: fields["wait_s"]}))
        oldest_s, before = self._steps[0][0], 0
        while self._scoring and self._scoring[0][0] < oldest_s:
            before += self._scoring.popleft()[1]
        if before:
            self._scoring.appendleft((oldest_s, before))

    def _answered(self, trajectory_id: int, at_s: float) -> None:
        if trajectory_id in self._pending:
            self._pending.remove(trajectory_id)
            self._scoring.append((at_s, -1))

    # ------------------------------------------------------------ result

    def use(self) -> TimeUse:
        """Of the time from the end of one step to the end of the last. Empty with fewer than two steps."""
        steps = list(self._steps)
        before = WARM_UP_STEPS if self.began_late else 0
        skipped = WARM_UP_STEPS - 1 - (before + self._num_steps - len(steps))
        steps = steps[skipped:] if 0 < skipped <= len(steps) // 2 else steps
        if len(steps) < 2:
            return TimeUse()
        period = steps[0][0], steps[-1][0]
        moments = Moments(period, list(_waits(steps)), self._scoring)
        replicas = {name: self._replica(name, moments, period) for name in sorted(self._loads)}
        alive = {name: causes for name, causes in replicas.items() if sum(causes.total.values()) > 0}
        _find_tail(alive.values())
        used = sum(causes.running_s for causes in alive.values())
        busy_s = sum(causes.total[DECODING] for causes in alive.values())
        scored = bool(self._scoring)
        return TimeUse(
            steps=len(steps) - 1,
            took_s=period[1] - period[0],
            trainer=self._trainer(steps[1:], period),
            replicas={name: causes.total for name, causes in alive.items()},
            rewards=self._rewards(moments) if scored else {},
            waits=_summed(causes.waiting for causes in alive.values()),
            running=used / busy_s if busy_s > 0 else None,
            scoring=sum(m.scoring * m.took_s for m in moments) / (period[1] - period[0]) if scored else None,
            controller=self._controller(period),
        )

    def _trainer(self, steps: list[tuple[float, Seconds]], period: Period) -> Seconds:
        stalls = [{cause: s} for at_s, cause, s in self._stalls if period[0] < at_s <= period[1]]
        total = _summed([*(seconds for _, seconds in steps), *stalls])
        rest_s = period[1] - period[0] - sum(total.values())
        return total | ({OTHER: rest_s} if rest_s > 0 else {})

    def _replica(self, name: str, moments: Moments, period: Period) -> _Causes:
        """Idle time between two reports is spread evenly. The reports of a new incarnation begin at 0."""
        causes, swaps = _Causes(), self._swaps.get(name, ())
        for before, now in pairwise(_settled(self._loads[name])):
            if now.at_s <= period[0] or before.at_s >= period[1] or now.busy_s < before.busy_s:
                continue
            between = before.at_s, now.at_s
            swap_s = sum(took_s for at_s, took_s in swaps if between[0] < at_s <= between[1])
            busy_s, idle_s = now.busy_s - before.busy_s, now.idle_s - before.idle_s
            running = max(before.running, now.running)
            causes.add(moments, between, busy_s, idle_s, swap_s=min(swap_s, idle_s), running=running)
        return causes

    def _rewards(self, moments: Moments) -> Seconds:
        busy_s = sum(min(m.scoring, self._workers) * m.took_s for m in moments)
        return {SCORING: busy_s, IDLE: self._workers * sum(m.took_s for m in moments) - busy_s}

    def _controller(self, period: Period) -> float | None:
        within = [(at_s, cpu_s) for at_s, cpu_s in self._cpu if period[0] <= at_s <= period[1]]
        if len(within) < 2:
            return None
        (first_s, first), (last_s, last) = within[0], within[-1]
        return (last - first) / (last_s - first_s)


@dataclass(slots=True)
class _Causes:
    """Of one replica: seconds by cause, those while the trainer waited, and trajectories times seconds.

    `without_work` are the moments that may be so, by their start: seconds of decoding, and idle seconds.
    """

    total: Seconds = field(default_factory=dict)
    waiting: Seconds = field(default_factory=dict)
    running_s: float = 0.0
    without_work: dict[float, tuple[float, float]] = field(default_factory=dict)

    def add(
        self, moments: Moments, between: Period, busy_s: float, idle_s: float, *, swap_s: float, running: int
    ) -> None:
        took_s = max(between[1] - between[0], 1e-9)
        for moment, both_s in moments.within(between):
            part = both_s / took_s
            cause = _idle_cause(moment)
            spent = {DECODING: part * busy_s, WEIGHTS: part * swap_s, cause: part * (idle_s - swap_s)}
            self.total = _summed((self.total, spent))
            self.running_s += part * busy_s * running
            if moment.waits:
                self.waiting = _summed((self.waiting, spent))
            if cause == NO_WORK:
                decoding, idle = self.without_work.get(moment.start_s, (0.0, 0.0))
                self.without_work[moment.start_s] = decoding + spent[DECODING], idle + spent[NO_WORK]


def _find_tail(replicas: Collection[_Causes]) -> None:
    """A replica that idles while another still decodes waits for completions there, and is not without work.
    In each moment all are taken to decode from its beginning."""
    busiest: dict[float, float] = {}
    for causes in replicas:
        for at_s, (decoding, _) in causes.without_work.items():
            busiest[at_s] = max(decoding, busiest.get(at_s, 0.0))
    for causes in replicas:
        moments = causes.without_work.items()
        tail_s = sum(min(idle, busiest[at_s] - decoding) for at_s, (decoding, idle) in moments)
        if tail_s > 0:
            for seconds in causes.total, causes.waiting:
                seconds[TAIL], seconds[NO_WORK] = tail_s, max(0.0, seconds[NO_WORK] - tail_s)


def _settled(loads: Iterable[_Load]) -> list[_Load]:
    """A report in the middle of a slice of decoding counts its time as idle, and the next takes that back."""
    settled: list[_Load] = []
    for load in reversed(list(loads)):
        later = settled[-1] if settled else load
        taken_back = load.busy_s <= later.busy_s and load.idle_s > later.idle_s
        settled.append(replace(load, idle_s=later.idle_s) if taken_back else load)
    return settled[::-1]


def _idle_cause(moment: Moment) -> str:
    """A replica that has nothing to do while the trainer works is as far ahead as the schedule permits."""
    if not moment.waits:
        return BOUND
    return REWARDS if moment.scoring else NO_WORK


def _summed(every: Iterable[Mapping[str, float]]) -> Seconds:
    total: Seconds = {}
    for seconds in every:
        for cause, took_s in seconds.items():
            total[cause] = total.get(cause, 0.0) + took_s
    return total


def _waits(steps: list[tuple[float, Seconds]]) -> Iterator[Period]:
    for at_s, seconds in steps:
        start_s = at_s - seconds[COMPUTING]
        yield start_s - seconds[BATCH], start_s
