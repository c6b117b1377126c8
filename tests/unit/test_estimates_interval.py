"""Intervals of 95 %."""

from __future__ import annotations

import math
import random

import pytest

from millrace.estimates.interval import of_mean, of_shares


def test_golden_values_of_the_score_interval() -> None:
    """Of 10 of 20 and of 0 of 10, as statsmodels.stats.proportion gives them (method "wilson")."""
    assert of_shares([1.0] * 10 + [0.0] * 10) == pytest.approx((0.299298, 0.700702), abs=1e-5)
    assert of_shares([0.0] * 10) == pytest.approx((0.0, 0.277533), abs=1e-5)


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["shares between", "0 and 1"])
def test_nineteen_of_twenty_intervals_hold_the_mean(spread: float) -> None:
    rng, held, rounds = random.Random(0), 0, 2000
    for _ in range(rounds):
        values = [float(rng.random() < 0.3) if spread else rng.betavariate(0.6, 1.4) for _ in range(40)]
        low, high = of_shares(values)
        held += low <= 0.3 <= high
    assert held / rounds > 0.94


def test_the_interval_of_a_mean_is_two_standard_errors() -> None:
    low, high = of_mean([1.0, 3.0])
    assert (low + high) / 2 == 2.0
    assert high - 2.0 == pytest.approx(1.959964)


def test_an_interval_of_nothing_is_not_a_number() -> None:
    assert all(map(math.isnan, (*of_shares([]), *of_mean([1.0]))))
