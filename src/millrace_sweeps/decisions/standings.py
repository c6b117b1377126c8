"""Which combination is best, and which trial ends early? Pure. A standing is the mean over seeds, and the
standard error of that mean. Two rules end trials, as decisions on series in which higher is better.

**Stopping.** A rule is asked about a trial when it has new steps, and about each step once: `looked` is the
last step of the time before. The answer is a reason, or an empty text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from millrace.estimates.interval import standard_error
from millrace_sweeps.decisions.space import identity
from millrace_sweeps.sweep_config import HalvingRule, MedianRule
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


# ---------------------------------------------------------------- stopping


Series = Sequence[tuple[int, float]]
"""(version, value) of one trial, in the order of the versions."""


def median_reason(rule: MedianRule, own: Series, finished: Sequence[Series], sign: int = 1) -> str:
    """The median stopping rule: stop at step s if the trial's best value up to s is worse than the median of
    the means, up to s, of all finished trials.

    Degenerate:
        Fewer than `trials_min` finished trials, or fewer than `steps_min` steps -> no stop.
    Source:
        Golovin et al., Google Vizier, KDD 2017, section 3.2.2. The two limits are ours.
    """
    step = own[-1][0] if own else 0
    means = [
        mean for series in finished if (mean := _mean_of([v for at, v in series if at <= step])) is not None
    ]
    best = max((value for _, value in own if math.isfinite(value)), default=-math.inf)
    if step < rule.steps_min or len(means) < rule.trials_min or best >= (middle := median(means)):
        return ""
    return (
        f"step {step}: its best value {sign * best:.4g} is worse than {sign * middle:.4g}, the median of "
        f"{len(means)} finished trials"
    )


def halving_reason(
    rule: HalvingRule, own: Series, others: Sequence[Series], *, looked: int, last: float, sign: int = 1
) -> str:
    """Asynchronous successive halving: at each rung, `steps_min` * `factor` ** k, a trial stops that is not
    among the best 1 / `factor` of the trials that have reached the rung so far.

    Degenerate:
        Fewer than `factor` trials at the rung, this one included -> no stop.
    Source:
        Li et al., A System for Massively Parallel Hyperparameter Tuning, arXiv:1810.05934 (ASHA). There a
        trial waits at a rung until it is promoted. Here it goes on or ends at once, so that it need not be
        stopped and resumed. A trial that comes early may then go on where the paper's would wait.
    """
    step = own[-1][0] if own else 0
    for rung in _rungs(rule, looked, step):
        mine = value_at(own, rung, last)
        reached = [series for series in others if series and series[-1][0] >= rung]
        values = [value for series in reached if (value := value_at(series, rung, last)) is not None]
        count, better = len(values) + 1, sum(mine is None or value > mine for value in values)
        if count >= rule.factor and better >= count // rule.factor:
            text = "no value" if mine is None else f"{sign * mine:.4g}"
            return f"step {rung}: its value {text} is in place {better + 1} of {count} trials so far"
    return ""


def _rungs(rule: HalvingRule, looked: int, step: int) -> Iterator[int]:
    """The rungs after `looked`, up to `step`."""
    rung = rule.steps_min
    while rung <= step:
        if rung > looked:
            yield rung
        rung *= rule.factor


def _mean_of(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


# ---------------------------------------------------------------- the value of a trial


def value_at(series: Series, version: int, last: float) -> float | None:
    """The mean of the values after version * (1 - last), up to `version`.

    Degenerate:
        No value there, as with rare evaluations -> the last value before. None before -> None.
    """
    known = [(at, value) for at, value in series if at <= version and math.isfinite(value)]
    latest = [value for at, value in known if at > version * (1 - last)] or [v for _, v in known[-1:]]
    return math.fsum(latest) / len(latest) if latest else None


def value_of(series: Series, last: float) -> float | None:
    """The value at the last version so far."""
    return value_at(series, series[-1][0], last) if series else None
