"""A run in one dictionary, accumulated from its events: `summary.json`.

Pure: no clock and no file. A resumed run first feeds the events of its earlier sessions
(`jsonl.read_events`), so that the summary is of all sessions. The summary keeps two numbers of each step and
one line of each dead worker; all else is sums.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from millrace.core.events import Event
from millrace.observe.replica_times import ReplicaTotals

TRAINED = "Tokens of all steps, over the time from the start of the first step to the end of the last step."
GENERATED = (
    "Tokens that the replicas generated, over the time from the start of the first replica to the last "
    "report of more tokens."
)


class Rate:
    """Tokens over their time. A pause between two sessions does not count."""

    def __init__(self) -> None:
        self._tokens, self._took_s = 0, 0.0
        self._until_s: float | None = None

    def begin_session(self) -> None:
        self._until_s = None

    def add(self, tokens: int, at_s: float, took_s: float) -> None:
        """`took_s` counts for the first call of a session. Later calls count the time since the call
        before."""
        self._tokens += tokens
        self._took_s += took_s if self._until_s is None else at_s - self._until_s
        self._until_s = at_s

    @property
    def per_s(self) -> float | None:
        return self._tokens / self._took_s if self._took_s > 0 else None


class Speeds:
    """A sink of all sessions of a run. A replayed step counts once."""

    def __init__(self) -> None:
        self.trained, self.generated = Rate(), Rate()
        self._totals: dict[str, int] = {}  # by replica: tokens since its start

    def __call__(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "run_started":
                self.trained.begin_session()
                self.generated.begin_session()
            case "step" if not fields.get("replayed"):
                self.trained.add(fields["trained_tokens"], event.time_s, fields["step_s"])
            case "report":
                before, total = self._totals.get(fields["replica"], 0), fields["generated_tokens"]
                self._totals[fields["replica"]] = total
                if more := total - before if total >= before else total:  # less: another incarnation
                    self.generated.add(more, event.time_s, fields["busy_s"] + fields["idle_s"])


_ACCOUNTS = ("admitted", "trained", "rejected", "stale", "abandoned", "failed", "in_flight")


def _numbers() -> array[float]:
    return array("d")


@dataclass(slots=True)
class _Session:
    """The share of one controller process in the run. Times are on its loop clock."""

    started_s: float
    ended_s: float
    ready_s: float | None = None  # when the first batch was complete and a step could begin
    waited_s: float = 0.0  # of the trainer, for batches after the first


@dataclass(slots=True)
class Summary:
    """A sink. `result()` may be called at any time."""

    replicas: ReplicaTotals = field(default_factory=ReplicaTotals)
    speeds: Speeds = field(default_factory=Speeds)
    _versions: array[int] = field(default_factory=lambda: array("q"))  # of the steps, ascending
    _rewards: array[float] = field(default_factory=_numbers)  # their mean rewards
    _staleness: Counter[int] = field(default_factory=Counter)  # of trained tokens
    _window: dict[str, Any] = field(default_factory=dict)
    _sessions: list[_Session] = field(default_factory=list)
    _gap_sum: float = 0.0
    _gap_tokens: int = 0
    _gap_max: float = 0.0
    _stalls: array[float] = field(default_factory=_numbers)
    _recoveries: array[float] = field(default_factory=_numbers)
    _deaths: list[dict[str, Any]] = field(default_factory=list)
    _started: set[tuple[str, str]] = field(default_factory=set)
    _counts: Counter[str] = field(default_factory=Counter)
    _accounting: dict[str, int] = field(default_factory=dict)
    _ended: dict[str, Any] = field(default_factory=dict)
    _inert: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if self._sessions and event.kind != "run_started":
            self._sessions[-1].ended_s = event.time_s
        self.replicas(event)
        self.speeds(event)
        self._counts[event.kind] += 1
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event, event.fields)

    # ------------------------------------------------------------ events

    def _on_run_started(self, event: Event, fields: dict[str, Any]) -> None:
        self._inert = fields.get("inert", [])
        self._sessions.append(_Session(event.time_s, event.time_s))
        self._started.clear()
        self._ended = {}

    def _on_step(self, event: Event, fields: dict[str, Any]) -> None:
        if self._sessions and not fields.get("replayed"):
            self._time_step(self._sessions[-1], event, fields)
        self._count_step(fields)
        self._window = fields.get("window", {})
        self._accounting = fields["accounting"]
        for behind, (mean, largest, tokens) in fields["logprob_gap"].items():
            if int(behind) == 0 and tokens:
                self._gap_sum += mean * tokens
                self._gap_tokens += tokens
                self._gap_max = max(self._gap_max, largest)

    def _count_step(self, fields: dict[str, Any]) -> None:
        """Count once per version: a replayed step trains on the same batch."""
        at = bisect_left(self._versions, fields["version"])
        if at < len(self._versions) and self._versions[at] == fields["version"]:
            return
        self._versions.insert(at, fields["version"])
        self._rewards.insert(at, fields["reward_mean"])
        self._staleness.update({int(s): n for s, n in fields["staleness_histogram"].items()})

    def _time_step(self, session: _Session, event: Event, fields: dict[str, Any]) -> None:
        if session.ready_s is None:
            session.ready_s = event.time_s - fields["step_s"]
        else:
            session.waited_s += fields["wait_s"]

    def _on_worker_started(self, _: Event, fields: dict[str, Any]) -> None:
        worker = (fields["role"], fields["name"])
        self._counts["restart of a worker"] += worker in self._started
        self._started.add(worker)

    def _on_worker_died(self, _: Event, fields: dict[str, Any]) -> None:
        self._deaths.append({key: fields.get(key) for key in ("role", "name", "epoch", "cause")})

    def _on_worker_recovered(self, _: Event, fields: dict[str, Any]) -> None:
        self._recoveries.append(fields["recovery_s"])

    def _on_published(self, _: Event, fields: dict[str, Any]) -> None:
        self._stalls.append(fields["stall_s"])

    def _on_rewound(self, _: Event, fields: dict[str, Any]) -> None:
        """Later steps are undone. Their computation still counts."""
        num_steps = bisect_right(self._versions, fields["version"])
        del self._versions[num_steps:], self._rewards[num_steps:]

    def _on_restarted(self, _: Event, fields: dict[str, Any]) -> None:
        self._counts["discarded tokens"] += fields["discarded_tokens"]

    def _on_run_ended(self, _: Event, fields: dict[str, Any]) -> None:
        self._accounting = fields["accounting"]
        self._ended = {"ok": fields["ok"], "reason": fields["reason"]}

    # ------------------------------------------------------------ result

    def result(self) -> dict[str, Any]:
        """Rates are those of `observe.summary`; fractions are of 1. What never happened is None.
        Key by key in `docs/observability.md`."""
        wall_s = sum(session.ended_s - session.started_s for session in self._sessions)
        first, last = ends_of(self._rewards)
        return {
            "ok": self._ended.get("ok"),
            "reason": self._ended.get("reason"),
            "inert": self._inert,
            "sessions": len(self._sessions),
            "steps": len(self._versions),
            "wall_s": wall_s,
            "reward_first": first,
            "reward_last": last,
            "trained_tokens_per_s": self.speeds.trained.per_s,
            "generated_tokens_per_s": self.speeds.generated.per_s,
            "right_drafts": self.replicas.right_drafts,
            "staleness": self._staleness_of_tokens(),
            "fairness": self._window.get("fairness"),
            "next": self._window.get("next"),
            "logprob_gap_staleness0": {
                "mean": self._gap_sum / self._gap_tokens if self._gap_tokens else None,
                "max": self._gap_max if self._gap_tokens else None,
            },
            "trainer_idle_fraction": self._trainer_idle_fraction(),
            "replica_idle_fraction": self.replicas.idle_fraction,
            "publish_stall_s": _median_and_max(self._stalls),
            "repacks": self._counts["moved"],
            "accounting": {name: self._accounting.get(name, 0) for name in _ACCOUNTS},
            "restarts": self._counts["restart of a worker"],
            "recovery_s": _median_and_max(self._recoveries),
            "deaths": self._deaths,
            "trajectory_restarts": self._counts["restarted"],
            "discarded_tokens": self._counts["discarded tokens"],
            "skipped": self._counts["skipped"],
            "rested": self._counts["rested"],
            "quarantined": self._counts["quarantined"],
            "rejected_batches": self._counts["step_rejected"],
            "checkpoints": self._counts["checkpoint"],
            "replicas": self.replicas.details(),
        }

    def _staleness_of_tokens(self) -> dict[str, float | None]:
        """Over trained tokens. p99: the smallest staleness that at least 99 % of them do not exceed."""
        tokens = self._staleness
        total = tokens.total()
        if not total:
            return {"mean": None, "p99": None, "max": None}
        seen, p99 = 0, 0
        for p99 in sorted(tokens):
            seen += tokens[p99]
            if seen * 100 >= total * 99:
                break
        mean = sum(s * n for s, n in tokens.items()) / total
        return {"mean": mean, "p99": p99, "max": max(s for s, n in tokens.items() if n)}

    def _trainer_idle_fraction(self) -> float | None:
        """Waiting for batches, of the time since the first batch was complete: filling the pipeline
        is start-up, not idling."""
        sessions = [s for s in self._sessions if s.ready_s is not None]
        span_s = sum(s.ended_s - s.ready_s for s in sessions if s.ready_s is not None)
        return sum(s.waited_s for s in sessions) / span_s if span_s > 0 else None


def ends_of(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Their means over the first and over the last tenth of the steps."""
    tenth = max(1, len(rewards) // 10)
    return (fmean(rewards[:tenth]), fmean(rewards[-tenth:])) if rewards else (None, None)


def _median_and_max(values: array[float]) -> dict[str, float | None]:
    return {"median": median(values) if values else None, "max": max(values, default=None)}
