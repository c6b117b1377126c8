"""Intervals of 95 %."""

from __future__ import annotations

import math
import random

import pytest

from millrace.estimates.interval import of_mean, of_shares, t_975


def test_golden_values_of_the_score_interval() -> None:
    """Of many prompts, as statsmodels.stats.proportion gives them (method "wilson"). Of 0 of 10 by hand:
    t^2 / (10 + t^2), with t = 2.262."""
    assert of_shares([1.0] * 5000 + [0.0] * 5000) == pytest.approx((0.490202, 0.509798), abs=1e-5)
    assert of_shares([0.0] * 10) == pytest.approx((0.0, 0.338469), abs=1e-3)


@pytest.mark.parametrize(
    ("freedom", "due"), [(1, 12.7062), (4, 2.7764), (14, 2.1448), (15, 2.1314), (30, 2.0423), (10**6, 1.96)]
)
def test_quantiles_of_students_t_are_those_of_tables(freedom: int, due: float) -> None:
    assert t_975(freedom) == pytest.approx(due, abs=5e-4)


@pytest.mark.parametrize("prompts", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["shares between", "0 and 1"])
def test_nineteen_of_twenty_intervals_hold_the_mean(spread: float, prompts: int) -> None:
    rng, num_covering, rounds = random.Random(0), 0, 2000
    for _ in range(rounds):
        values = [float(rng.random() < 0.3) if spread else rng.betavariate(0.6, 1.4) for _ in range(prompts)]
        low, high = of_shares(values)
        num_covering += low <= 0.3 <= high
    assert num_covering / rounds > 0.94


def test_the_interval_of_a_mean_is_that_of_students_t() -> None:
    low, high = of_mean([1.0, 3.0])
    assert (low + high) / 2 == 2.0
    assert high - 2.0 == pytest.approx(12.706)
    rng = random.Random(0)
    found = [of_mean([rng.gauss(5.0, 2.0) for _ in range(4)]) for _ in range(2000)]
    assert sum(low <= 5.0 <= high for low, high in found) / len(found) == pytest.approx(0.95, abs=0.015)


def test_one_prompt_tells_nothing_of_the_others() -> None:
    assert of_shares([1.0]) == (0.0, 1.0)


def test_an_interval_of_nothing_is_not_a_number() -> None:
    assert all(map(math.isnan, (*of_shares([]), *of_mean([1.0]))))
