"""The comparison of a sweep: which combination of keys is best, by all of its seeds."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from millrace_sweeps.board import ranking
from millrace_sweeps.decisions.standings import ended_value, standings
from millrace_sweeps.trial_record import SweepTrial, Trials, TrialState

FINISHED, STOPPED, FAILED = TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED
STEADY = ((FINISHED, 0.8), (FINISHED, 0.8), (FINISHED, 0.82))


def of(state: TrialState, value: float | None, **overrides: object) -> SweepTrial:
    return SweepTrial(overrides, state, value)


def test_the_ranking_has_means_over_seeds_and_puts_what_was_stopped_behind_what_finished() -> None:
    every = {
        "a": of(FINISHED, 1.0, lr=1, seed=1),
        "b": of(FINISHED, 3.0, lr=1, seed=2),
        "c": of(FINISHED, 2.5, lr=2, seed=1),
        "d": of(STOPPED, 9.0, lr=2, seed=2),
        "e": of(STOPPED, 8.0, lr=3, seed=1),
        "f": of(FAILED, None, lr=4, seed=1),
    }
    ranked = standings(Trials("reward/mean", "max", True, every))
    assert [(one.overrides["lr"], one.value) for one in ranked] == [(2, 5.75), (1, 2.0), (3, 8.0), (4, None)]
    assert ranked[1].error == 1.0 and math.isnan(ranked[2].error)  # sqrt(2 / 1 / 2)
    assert (ranked[0].num_finished, ranked[0].num_stopped, ranked[3].num_failed) == (1, 1, 1)
    lowest = standings(Trials("reward/mean", "min", True, every))
    assert [one.overrides["lr"] for one in lowest] == [1, 2, 3, 4]


def seeds_of(*ends: tuple[TrialState, float | None], lr: float) -> dict[str, SweepTrial]:
    return {f"{lr}-{i}": of(state, value, lr=lr, seed=i) for i, (state, value) in enumerate(ends)}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("lucky", "mean"),
    [
        (((FINISHED, 0.9), (STOPPED, 0.1), (STOPPED, 0.1)), 1.1 / 3),
        (((FINISHED, 0.9), (FAILED, 0.1), (FAILED, 0.2)), 0.4),
        (((FINISHED, 0.9), (FAILED, None), (FAILED, None)), None),
        (((FINISHED, 0.9), (STOPPED, None), (FINISHED, 0.9)), None),
        (((FINISHED, 0.9), (FINISHED, None), (FINISHED, 0.9)), None),
        (((STOPPED, 0.9), (FAILED, 0.9), (FAILED, 0.9)), 0.9),
    ],
)
def test_one_lucky_seed_is_not_better_than_three_good_ones(
    lucky: tuple[tuple[TrialState, float | None], ...], mean: float | None, sign: int
) -> None:
    signed = [(state, None if value is None else sign * value) for state, value in lucky]
    steady = [(state, sign * value) for state, value in STEADY]
    every = seeds_of(*signed, lr=1) | seeds_of(*steady, lr=2)
    ranked = standings(Trials("reward/mean", "max" if sign > 0 else "min", True, every))
    assert [one.overrides["lr"] for one in ranked] == [2, 1]
    due = None if mean is None else pytest.approx(sign * mean)
    assert ended_value([every[f"1-{i}"] for i in range(3)]) == due


def test_a_combination_with_a_seed_that_goes_on_has_no_value_for_optuna() -> None:
    running = seeds_of((FINISHED, 0.9), (TrialState.RUNNING, 0.1), lr=1)
    assert ended_value(running.values()) is None


def test_the_ranking_tells_how_many_seeds_a_mean_is_of_and_which_ended_early() -> None:
    every = seeds_of((FINISHED, 0.9), (STOPPED, 0.1), (FAILED, None), lr=1)
    terminal = Console(width=100)
    with terminal.capture() as captured:
        terminal.print(ranking(Trials("reward/mean", "max", True, every)))
    assert "0.5" in captured.get() and "2 of 3  1 stopped early, 1 failed" in captured.get()
