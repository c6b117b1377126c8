"""When a trajectory that waits between two turns is expected back."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from millrace.core.turns.gaps import Gaps


def learned(mean: float, spread: float, count: int = 4000) -> Gaps:
    gaps, rng = Gaps(), random.Random(3)
    for tid in range(count):
        gaps.leave(tid, 10.0)
        gaps.come_back(tid, 10.0 + rng.lognormvariate(mean, spread))
    return gaps


@pytest.mark.parametrize("waited_s", [0.1, 2.0, 30.0])
def test_the_time_left_is_that_of_the_log_normal_that_was_seen(waited_s: float) -> None:
    gaps = learned(1.0, 0.8)
    gaps.leave(-1, 0.0)
    draws = np.random.default_rng(1).lognormal(1.0, 0.8, 1_000_000)
    expected = draws[draws > waited_s].mean() - waited_s
    assert gaps.left_s(-1, waited_s) == pytest.approx(expected, rel=0.15)


def test_one_that_is_long_overdue_comes_last_and_one_that_never_left_after_it() -> None:
    gaps = learned(0.0, 0.5)
    gaps.leave(-1, 0.0)
    gaps.leave(-2, 99.0)
    assert gaps.left_s(-2, 100.0) < gaps.left_s(-1, 100.0) < gaps.left_s(-3, 100.0) == math.inf


def test_short_gaps_bring_the_return_nearer_and_long_ones_put_it_off() -> None:
    times = {mean: learned(mean, 0.5, 20) for mean in (-3.0, 3.0)}
    for gaps in (Gaps(), *times.values()):
        gaps.leave(-1, 0.0)
    new = Gaps()
    new.leave(-1, 0.0)
    assert times[-3.0].left_s(-1, 0.01) < new.left_s(-1, 0.01) < times[3.0].left_s(-1, 0.01)


@pytest.mark.parametrize("waited_s", [0.0, 1e-9, 1.0, 1e3, 1e9, 1e300])
def test_every_time_has_an_expected_rest(waited_s: float) -> None:
    for gaps in (Gaps(), learned(0.0, 0.0, 500), learned(-9.0, 3.0, 50)):
        gaps.leave(-1, 0.0)
        assert 0.0 <= gaps.left_s(-1, waited_s) < math.inf


def test_the_rest_has_no_jump_where_the_tail_becomes_its_asymptote() -> None:
    gaps = learned(0.0, 0.3)
    gaps.leave(-1, 0.0)
    rests = [gaps.left_s(-1, math.exp(0.3 * z)) / math.exp(0.3 * z) for z in (29.5, 30.5)]
    assert rests[1] == pytest.approx(rests[0], rel=0.1)


def test_departures_are_bounded() -> None:
    gaps = Gaps()
    for tid in range(10_001):
        gaps.leave(tid, 0.0)
    assert gaps.left_s(0, 1.0) == math.inf and gaps.left_s(1, 1.0) < math.inf
