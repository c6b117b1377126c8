"""Which combination is best? Its mean over seeds, and the standard error of that mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.estimates.interval import standard_error
from millrace.sweeps.decisions.space import identity
from millrace.sweeps.trial_record import ENDED, SweepTrial, Trials, TrialState


@dataclass(frozen=True)
class Standing:
    """One combination of keys. `value` and `error` are of its finished trials; without such a trial, of those
    that were stopped early, and `stopped` says so. `error` is nan for one trial alone."""

    overrides: Mapping[str, Any]
    names: tuple[str, ...]
    value: float | None
    error: float
    num_finished: int
    num_stopped: int
    num_failed: int

    @property
    def stopped(self) -> bool:
        return self.num_finished == 0 and self.num_stopped > 0


def standings(trials: Trials) -> list[Standing]:
    """All combinations, the best first. Those with a finished trial come before those that were stopped, and
    those come before those without a value."""
    sign = 1 if trials.goal == "max" else -1
    every = [_standing(overrides, members) for overrides, members in combinations(trials)]
    return sorted(every, key=lambda one: (one.value is None, one.stopped, -sign * (one.value or 0.0)))


def combinations(trials: Trials) -> list[tuple[Mapping[str, Any], dict[str, SweepTrial]]]:
    """Each combination without its seed, and its trials by name."""
    grouped: dict[str, tuple[Mapping[str, Any], dict[str, SweepTrial]]] = {}
    for name, trial in trials.trials.items():
        hidden = {"seed"} if trials.swept_seeds else set()
        overrides = {key: value for key, value in trial.overrides.items() if key not in hidden}
        grouped.setdefault(identity(overrides), (overrides, {}))[1][name] = trial
    return list(grouped.values())


def finished_value(members: Iterable[SweepTrial]) -> float | None:
    """The mean value of trials that have all ended. None: one has not, or none has a value."""
    members = list(members)
    if any(trial.state not in ENDED for trial in members):
        return None
    return _mean(_valued(members, TrialState.FINISHED) or _valued(members, TrialState.STOPPED))


def _standing(overrides: Mapping[str, Any], members: Mapping[str, SweepTrial]) -> Standing:
    finished = _valued(members.values(), TrialState.FINISHED)
    values = finished or _valued(members.values(), TrialState.STOPPED)
    counts = {state: sum(t.state is state for t in members.values()) for state in TrialState}
    return Standing(
        overrides,
        tuple(members),
        _mean(values),
        standard_error(values),
        counts[TrialState.FINISHED],
        counts[TrialState.STOPPED],
        counts[TrialState.FAILED],
    )


def _valued(members: Iterable[SweepTrial], state: TrialState) -> list[float]:
    return [trial.value for trial in members if trial.state is state and trial.value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
