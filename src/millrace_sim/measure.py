"""Results of a simulated run, collected from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from millrace.core.events import Event
from millrace.core.fairness import LengthMoments, fairness, next_correlation
from millrace.observe.environment_use import EnvironmentUse
from millrace_sim.simulation import Observer, Scenario, simulate

BATCHES_MIN = 8
"""Fewer batches have no fairness. Of 8 random batches, fairness has a standard error of sqrt(2 / 7) = 0.53,
and less over several seeds."""


OnProgress = Callable[[int, float, int], None]


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One report of a replica. `busy` and `kv` are fractions, `busy` since the previous report."""

    time_s: float
    version: int
    running: int
    busy: float
    kv: float


@dataclass(frozen=True, slots=True)
class TimedWork:
    """Work of the trainer or of a replica from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    what: str
    version: int


@dataclass(frozen=True, slots=True)
class Result:
    """The steady part of a run. Fractions are of time; tokens are real tokens, not units.

    `staleness` is the share of trained tokens by staleness in versions. `fairness` and `next` are
    `core.fairness`'s over the batches that count, from `BATCHES_MIN` of them on.
    """

    schedule: str
    seed: int
    steps: int
    step_s: float
    trained_tokens_per_s: float
    generated_tokens_per_s: float
    trainer_busy: float
    trainer_waits: float
    replica_busy: float
    kv_used: float
    staleness_mean: float
    staleness_max: int
    repacks: int
    pulls: int
    restarts: int
    virtual_s: float
    fairness: float | None = None
    next: float | None = None
    episode_waits: float | None = None  # share of the time of episodes; None: no environment answers
    answer_s: float | None = None
    staleness: dict[int, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Timeline:
    """The reports of each replica, and the spans of the trainer."""

    samples: dict[str, list[ReplicaSample]] = field(default_factory=dict)
    trainer: list[TimedWork] = field(default_factory=list)
    pulls: list[tuple[str, TimedWork]] = field(default_factory=list)


class Measure(Observer):
    """Watches one run, and counts its steps from the one after `first` to `last`: before those steps the
    pipeline fills, and after them nothing new starts."""

    def __init__(
        self, scenario: Scenario, first: int, last: int, on_progress: OnProgress | None = None
    ) -> None:
        self._scenario, self._first, self._last = scenario, first, last
        self._on_progress, self._num_events = on_progress, 0
        self.timeline = Timeline()
        self._steps: list[Event] = []
        self._counts: Counter[str] = Counter()
        self._environment = EnvironmentUse()
        self._load: dict[str, dict[str, float]] = {}
        self._from: dict[str, dict[str, float]] = {}
        self._until: dict[str, dict[str, float]] = {}
        self._started_s = 0.0
        self._ended_s = 0.0

    def on_event(self, event: Event) -> None:
        fields = event.fields
        self._num_events += 1
        if len(self._steps) < self._last:
            self._environment(event)
        match event.kind:
            case "report":
                self._report(event.time_s, fields)
            case "step":
                self._step(event)
            case "published":
                copied_s = event.time_s - fields["digest_s"]
                self._span("published", copied_s, fields["stall_s"], fields["version"])
            case "pulled":
                span = TimedWork(event.time_s - fields["swap_s"], event.time_s, "pulled", fields["version"])
                self.timeline.pulls.append((fields["replica"], span))
                self._counts["pulled"] += 1
            case "moved" | "worker_died":
                self._counts[event.kind] += 1

    def _report(self, time_s: float, load: dict[str, Any]) -> None:
        name = load["replica"]
        before = self._load.get(name)
        if before is None or load["busy_s"] < before["busy_s"]:
            before = {"busy_s": 0.0, "idle_s": 0.0}
        busy, idle = load["busy_s"] - before["busy_s"], load["idle_s"] - before["idle_s"]
        kv = load["kv_used_tokens"] / max(1, load["kv_capacity_tokens"])
        sample = ReplicaSample(time_s, load["version"], load["running"], busy / max(busy + idle, 1e-9), kv)
        self.timeline.samples.setdefault(name, []).append(sample)
        self._load[name] = load

    def _step(self, event: Event) -> None:
        self._steps.append(event)
        self._span("step", event.time_s, event.fields["step_s"], event.fields["version"])
        version = event.fields["version"]
        if self._on_progress is not None:
            self._on_progress(version, event.time_s, self._num_events)
        if version == self._first:
            self._started_s, self._from = event.time_s, dict(self._load)
            self._environment.take_scalars()
        if version <= self._last:
            self._ended_s, self._until = event.time_s, dict(self._load)

    def _span(self, what: str, end_s: float, seconds: float, version: int) -> None:
        self.timeline.trainer.append(TimedWork(end_s - seconds, end_s, what, version))

    # ------------------------------------------------------------ result

    def result(self, virtual_s: float) -> Result:
        counted = [e for e in self._steps if self._first < e.fields["version"] <= self._last]
        span_s = max(self._ended_s - self._started_s, 1e-9)
        unit = self._scenario.workload.quantum
        histogram: Counter[int] = Counter()
        for event in counted:
            histogram.update(event.fields["staleness_histogram"])
        tokens = max(1, histogram.total())
        lengths = [LengthMoments(**event.fields["lengths"]) for event in counted]
        lengths = lengths if len(lengths) >= BATCHES_MIN else []
        busy_s, idle_s, generated = (self._grown(key) for key in ("busy_s", "idle_s", "generated_tokens"))
        rows = self.timeline.samples.values()
        kv = [s.kv for row in rows for s in row if self._started_s <= s.time_s <= self._ended_s]
        return Result(
            schedule=self._scenario.config.schedule.kind,
            seed=self._scenario.seed,
            steps=len(counted),
            step_s=span_s / max(1, len(counted)),
            trained_tokens_per_s=sum(e.fields["trained_tokens"] for e in counted) * unit / span_s,
            generated_tokens_per_s=generated * unit / span_s,
            trainer_busy=sum(e.fields["step_s"] for e in counted) / span_s,
            trainer_waits=sum(e.fields["wait_s"] for e in counted) / span_s,
            replica_busy=busy_s / max(busy_s + idle_s, 1e-9),
            kv_used=fmean(kv) if kv else 0.0,
            staleness_mean=sum(s * n for s, n in histogram.items()) / tokens,
            staleness_max=max(histogram, default=0),
            repacks=self._counts["moved"],
            pulls=self._counts["pulled"],
            restarts=self._counts["worker_died"],
            virtual_s=virtual_s,
            fairness=fairness(lengths),
            next=next_correlation(lengths),
            episode_waits=self._environment.waiting_share,
            answer_s=self._environment.mean_answer_s,
            staleness={s: n / tokens for s, n in sorted(histogram.items())},
        )

    def _grown(self, key: str) -> float:
        """Growth of a counter of all replicas while steps counted; one that restarted counts from 0."""
        total = 0.0
        for name, load in self._until.items():
            before = self._from.get(name, {}).get(key, 0.0)
            total += load[key] - before if load[key] >= before else load[key]
        return total


def window(scenario: Scenario) -> tuple[int, int]:
    """The steps to measure, first excluded: from when versions as old as the bound allows are trained until
    admission has stopped for want of steps. In a short run, at least a third of it."""
    steps, bound = scenario.config.steps, scenario.config.staleness_bound
    margin = 2 if bound is None else bound
    first = min(max(1, margin), steps // 3)
    return first, max(steps - margin, first + max(1, steps // 3))


def measure(scenario: Scenario, on_progress: OnProgress | None = None) -> tuple[Result, Timeline]:
    """Simulate, and return the result. `on_progress` gets each step: its version, the virtual time in
    seconds, and the number of events so far."""
    watch = Measure(scenario, *window(scenario), on_progress)
    outcome = simulate(scenario, watch)
    return watch.result(outcome.wall_s), watch.timeline
