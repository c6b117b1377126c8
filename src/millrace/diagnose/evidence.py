"""The doctor's evidence: the events of a run, reduced to plain numbers. A sink that decides nothing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from millrace.core.events import Event
from millrace.core.fairness import LengthMoments
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.replica_times import Hosts

Gap = tuple[
    float, float, int
]  # mean and max of |trainer's log-prob - engine's| in nats, over how many tokens


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of a step's batch. When the step ended, `groups_ready` groups waited for a later step."""

    lengths: LengthMoments
    staleness_mean: float
    groups_ready: int
    step_s: float
    wait_s: float
    replayed: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step. It made `version`; `gap` is by staleness."""

    version: int
    reward_mean: float
    gap: dict[int, Gap]
    metrics: dict[str, float]
    batch: BatchFigures | None = None  # None: an older version of Millrace did not record it
    reward_metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedPull:
    replica: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The greedy accuracy of a version in an evaluation, with its interval of 95 %."""

    greedy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CanaryReward:
    """The mean reward of the samples of a canary, with its interval of 95 %. `correct` is the lower end of
    the interval of the share that is correct. `earned`: some completion has a reward above 0."""

    mean: float
    low: float
    high: float
    correct: float
    earned: bool


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A completion with its reward and its prompt. `metrics` are of its reward."""

    row_id: str
    reward: float
    prompt: str
    completion: str
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardRange:
    """All rewards so far: the lowest, the highest, and how many."""

    low: float = math.inf
    high: float = -math.inf
    num: int = 0

    def with_reward(self, value: float) -> RewardRange:
        return RewardRange(min(self.low, value), max(self.high, value), self.num + 1)


@dataclass(slots=True)
class Evidence:
    """A sink. Steps are by version; of a replayed step the last replay counts. `dtype` is the engine's, or
    the trainer's if that has fewer bits.
    `schedule` and `algorithm` are the kinds in use. `corrects`: importance weights are on. `plain`: tokens
    are sampled from the policy at its temperature, and no setting makes some tokens more or less likely.
    `compares`: advantages are 0 if all rewards of a group are equal. `canaries` are the evaluations that are,
    each with its kind. `reported` and `gone`: the findings that the run itself reported and withdrew. Texts
    are of the ledger: a run that goes on has none."""

    dtype: str = "float32"
    schedule: str = ""
    algorithm: str = "grpo"
    corrects: bool = True
    plain: bool = True
    compares: bool = True
    canaries: dict[str, str] = field(default_factory=dict)
    by_version: dict[int, Step] = field(default_factory=dict)
    published: dict[int, set[str]] = field(default_factory=dict)
    pulls: list[ServedPull] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)  # of scored trajectories
    failures: Counter[str] = field(default_factory=Counter)  # reasons of failed rewards
    evaluated: dict[str, dict[int, Accuracy]] = field(default_factory=dict)  # by name and version
    canary_rewards: dict[str, dict[int, CanaryReward]] = field(default_factory=dict)  # the same
    skipped: Counter[str] = field(default_factory=Counter)  # evaluations of each name
    rewards: RewardRange = field(default_factory=RewardRange)
    canary_texts: list[ScoredText] = field(default_factory=list)
    early_texts: list[ScoredText] = field(default_factory=list)  # each of another row
    late_texts: list[ScoredText] = field(default_factory=list)
    unpaid_texts: list[ScoredText] = field(default_factory=list)  # late, at most half of the highest reward
    hosts: Hosts = field(default_factory=Hosts)
    environment: EnvironmentUse = field(default_factory=EnvironmentUse)
    reported: dict[str, int] = field(default_factory=dict)  # faults, and the version of each report
    gone: dict[str, str] = field(default_factory=dict)  # withdrawn faults, with the text
    end: str = ""  # why the run ended; empty while it has not

    def __call__(self, event: Event) -> None:
        fields = event.fields
        self.hosts(event)
        self.environment(event)
        match event.kind:
            case "run_started":
                self.end, self.schedule = "", fields.get("schedule", "")
            case "rewound":
                self._rewind(fields["version"])
            case "step":
                self.by_version[fields["version"]] = _step(fields)
            case "published" | "staged":
                self.published.setdefault(fields["version"], set()).add(fields["digest"])
            case "pulled":
                self.pulls.append(ServedPull(fields["replica"], fields["version"], fields["digest"]))
            case "scored":
                self._count(fields["outcome"], fields["reason"], fields.get("value"))
            case "evaluated":
                self._evaluated(fields["name"], fields["version"], fields["metrics"])
            case "evaluation_skipped":
                self.skipped[fields["name"]] += 1
            case "finding" | "withdrawn":
                self._record(event.kind, str(fields["fault"]), fields)
            case "run_ended":
                self.end = fields["reason"]

    def _rewind(self, version: int) -> None:
        every: list[dict[int, Any]] = [
            self.by_version,
            *self.evaluated.values(),
            *self.canary_rewards.values(),
        ]
        for series in every:
            for later in [each for each in series if each > version]:
                del series[later]

    def _evaluated(self, name: str, version: int, metrics: dict[str, Any]) -> None:
        if name in self.canaries:
            if metrics["reward_mean"] is not None:
                self.canary_rewards.setdefault(name, {})[version] = _canary_reward(metrics)
        elif metrics["greedy_accuracy"] is not None:
            low, high = metrics["intervals"]["greedy_accuracy"]
            accuracy = Accuracy(metrics["greedy_accuracy"], low, high)
            self.evaluated.setdefault(name, {})[version] = accuracy

    def _count(self, outcome: str, reason: str, value: float | None) -> None:
        self.outcomes[outcome] += 1
        if value is not None:
            self.rewards = self.rewards.with_reward(value)
        if outcome == "failed":
            self.failures[reason] += 1

    def _record(self, kind: str, fault: str, fields: dict[str, Any]) -> None:
        if kind == "finding":
            self.reported[fault] = self.version
            self.gone.pop(fault, None)
        else:
            self.reported.pop(fault, None)
            self.gone[fault] = str(fields["reason"])

    @property
    def version(self) -> int:
        """The newest version."""
        return max(self.by_version, default=0)

    @property
    def steps(self) -> list[Step]:
        return [self.by_version[version] for version in sorted(self.by_version)]


def _step(fields: dict[str, Any]) -> Step:
    gap = {
        int(staleness): (mean, most, num) for staleness, (mean, most, num) in fields["logprob_gap"].items()
    }
    metrics = {name: value for name, value in fields["metrics"].items() if isinstance(value, int | float)}
    rewards = fields.get("reward_metrics", {})
    return Step(fields["version"], fields["reward_mean"], gap, metrics, _batch(fields), rewards)


def _canary_reward(metrics: dict[str, Any]) -> CanaryReward:
    low, high = metrics["intervals"]["reward_mean"]
    correct, _ = metrics["intervals"]["sampled_accuracy"]
    accuracies = metrics["sampled_accuracy"], metrics["greedy_accuracy"] or 0.0
    earned = metrics["reward_mean"] > 0 or max(accuracies) > 0
    return CanaryReward(metrics["reward_mean"], low, high, correct, earned)


def _batch(fields: dict[str, Any]) -> BatchFigures | None:
    if "lengths" not in fields:
        return None
    names = "staleness_mean", "groups_ready", "step_s", "wait_s", "replayed"
    return BatchFigures(LengthMoments(**fields["lengths"]), **{name: fields[name] for name in names})
