"""Results of a run from its events: the same numbers for a real and for a simulated run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from millrace.core.errors import DataError
from millrace.core.events import Event

WARM_UP_STEPS = 5


def newest_session(events: Sequence[Event]) -> Sequence[Event]:
    """The events since the run was last started or resumed. Each session has a clock of its own."""
    begins = (at for at in range(len(events) - 1, -1, -1) if events[at].kind == "run_started")
    return events[next(begins, 0) :]


@dataclass(frozen=True, slots=True)
class Achieved:
    """Results between the end of step `WARM_UP_STEPS` and the end of the last step, of the newest session.
    Fractions are of that time."""

    trained_tokens_per_s: float
    step_s: float  # from one step to the next
    staleness_mean: float  # over trained tokens
    trainer_idle: float  # waiting for a batch
    replica_idle: float  # of all replicas

    @classmethod
    def of(cls, events: Iterable[Event]) -> Achieved:
        """Raises: DataError: fewer than `WARM_UP_STEPS` + 2 steps."""
        events = newest_session(list(events))
        steps = [e for e in events if e.kind == "step" and not e.fields.get("replayed")]
        if len(steps) < WARM_UP_STEPS + 2:
            raise DataError(
                f"the run's newest session has {len(steps)} steps: {WARM_UP_STEPS + 2} are the least to "
                "measure anything"
            )
        counted = steps[WARM_UP_STEPS:]
        began_s, ended_s = steps[WARM_UP_STEPS - 1].time_s, steps[-1].time_s
        span_s = ended_s - began_s
        return cls(
            trained_tokens_per_s=sum(e.fields["trained_tokens"] for e in counted) / span_s,
            step_s=span_s / len(counted),
            staleness_mean=_staleness(counted),
            trainer_idle=sum(e.fields["wait_s"] for e in counted) / span_s,
            replica_idle=_idle([e for e in events if e.kind == "report" and began_s <= e.time_s <= ended_s]),
        )

    def as_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _staleness(steps: Sequence[Event]) -> float:
    weighted = tokens = 0
    for step in steps:
        for staleness, count in step.fields["staleness_histogram"].items():
            weighted += int(staleness) * count
            tokens += count
    return weighted / max(tokens, 1)


def _idle(reports: Sequence[Event]) -> float:
    """The idle fraction of the replicas' time, from their counters between first and last report.
    Counters that fall are those of a new incarnation."""
    before: dict[str, dict[str, Any]] = {}
    busy_s = idle_s = 0.0
    for report in reports:
        now = report.fields
        earlier = before.get(now["replica"])
        if earlier is not None and now["busy_s"] >= earlier["busy_s"]:
            busy_s += now["busy_s"] - earlier["busy_s"]
            idle_s += now["idle_s"] - earlier["idle_s"]
        before[now["replica"]] = now
    return idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0
