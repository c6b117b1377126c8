"""Which combination is best? Its mean over seeds, and the standard error of that mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.estimates.interval import standard_error
from millrace_sweeps.decisions.space import identity
from millrace_sweeps.trial_record import ENDED, SweepTrial, Trials


@dataclass(frozen=True)
class Standing:
    """One combination of keys. `value` and `error` are of all seeds that ended, each with the value that it
    had at its end, whether it finished, was stopped early or failed. So a seed that went badly is not left
    out. `num_unvalued` of them ended without a value. `error` is nan for one value alone."""

    overrides: Mapping[str, Any]
    names: tuple[str, ...]
    value: float | None
    error: float
    num_finished: int
    num_stopped: int
    num_failed: int
    num_unvalued: int

    @property
    def order(self) -> int:
        """Classes that are not compared by their values. 0: each seed has a value, and one finished. 1: each
        has a value, and none finished. 2: a seed ended without a value. 3: none has a value."""
        if self.value is None:
            return 3
        return 2 if self.num_unvalued else int(self.num_finished == 0)


def standings(trials: Trials) -> list[Standing]:
    """All combinations, the best first, by `Standing.order` and then by value."""
    sign = 1 if trials.goal == "max" else -1
    every = [_standing(overrides, members) for overrides, members in combinations(trials)]
    return sorted(every, key=lambda one: (one.order, -sign * (one.value or 0.0)))


def combinations(trials: Trials) -> list[tuple[Mapping[str, Any], dict[str, SweepTrial]]]:
    """Each combination without its seed, and its trials by name."""
    grouped: dict[str, tuple[Mapping[str, Any], dict[str, SweepTrial]]] = {}
    for name, trial in trials.trials.items():
        hidden = {"seed"} if trials.swept_seeds else set()
        overrides = {key: value for key, value in trial.overrides.items() if key not in hidden}
        grouped.setdefault(identity(overrides), (overrides, {}))[1][name] = trial
    return list(grouped.values())


def ended_value(members: Iterable[SweepTrial]) -> float | None:
    """The mean value of trials that have all ended. None: one has not, or one ended without a value."""
    values = [trial.value if trial.state in ENDED else None for trial in members]
    valued = [value for value in values if value is not None]
    return _mean(valued) if len(valued) == len(values) else None


def _standing(overrides: Mapping[str, Any], members: Mapping[str, SweepTrial]) -> Standing:
    ended = [trial for trial in members.values() if trial.state in ENDED]
    values = [trial.value for trial in ended if trial.value is not None]
    finished, stopped, failed = (sum(trial.state is state for trial in ended) for state in ENDED)
    return Standing(
        overrides,
        tuple(members),
        _mean(values),
        standard_error(values),
        finished,
        stopped,
        failed,
        len(ended) - len(values),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
