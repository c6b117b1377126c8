"""The doctor's evidence: the events of a run, reduced to plain numbers. A sink that decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from millrace.core.events import Event
from millrace.core.fairness import LengthMoments
from millrace.observe.hosts import Hosts

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


@dataclass(slots=True)
class Evidence:
    """A sink. Steps are by version; of a replayed step the last replay counts. `dtype` is the engine's.
    `schedule` and `algorithm` are the kinds in use. `corrects`: importance weights are on. `plain`: tokens
    are sampled from the policy at its temperature, and no setting makes some tokens more or less likely.
    `compares`: advantages are 0 if all rewards of a group are equal. `reported` and `gone`: the findings that
    the run itself reported and withdrew."""

    dtype: str = "float32"
    schedule: str = ""
    algorithm: str = "grpo"
    corrects: bool = True
    plain: bool = True
    compares: bool = True
    by_version: dict[int, Step] = field(default_factory=dict)
    published: dict[int, set[str]] = field(default_factory=dict)
    pulls: list[ServedPull] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)  # of scored trajectories
    failures: Counter[str] = field(default_factory=Counter)  # reasons of failed rewards
    evaluated: dict[str, dict[int, Accuracy]] = field(default_factory=dict)  # by name and version
    skipped: Counter[str] = field(default_factory=Counter)  # evaluations of each name
    hosts: Hosts = field(default_factory=Hosts)
    reported: dict[str, int] = field(default_factory=dict)  # faults, and the version of each report
    gone: dict[str, str] = field(default_factory=dict)  # withdrawn faults, with the text
    end: str = ""  # why the run ended; empty while it has not

    def __call__(self, event: Event) -> None:
        fields = event.fields
        self.hosts(event)
        match event.kind:
            case "run_started":
                self.end, self.schedule = "", fields.get("schedule", "")
            case "rewound":
                self.by_version = {v: s for v, s in self.by_version.items() if v <= fields["version"]}
                for name, series in self.evaluated.items():
                    self.evaluated[name] = {v: a for v, a in series.items() if v <= fields["version"]}
            case "step":
                self.by_version[fields["version"]] = _step(fields)
            case "published" | "staged":
                self.published.setdefault(fields["version"], set()).add(fields["digest"])
            case "pulled":
                self.pulls.append(ServedPull(fields["replica"], fields["version"], fields["digest"]))
            case "scored":
                self._count(fields["outcome"], fields["reason"])
            case "evaluated" if (metrics := fields["metrics"])["greedy_accuracy"] is not None:
                low, high = metrics["intervals"]["greedy_accuracy"]
                accuracy = Accuracy(metrics["greedy_accuracy"], low, high)
                self.evaluated.setdefault(fields["name"], {})[fields["version"]] = accuracy
            case "evaluation_skipped":
                self.skipped[fields["name"]] += 1
            case "finding" | "withdrawn":
                self._record(event.kind, str(fields["fault"]), fields)
            case "run_ended":
                self.end = fields["reason"]

    def _count(self, outcome: str, reason: str) -> None:
        self.outcomes[outcome] += 1
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
    return Step(fields["version"], fields["reward_mean"], gap, metrics, _batch(fields))


def _batch(fields: dict[str, Any]) -> BatchFigures | None:
    if "lengths" not in fields:
        return None
    names = "staleness_mean", "groups_ready", "step_s", "wait_s", "replayed"
    return BatchFigures(LengthMoments(**fields["lengths"]), **{name: fields[name] for name in names})
