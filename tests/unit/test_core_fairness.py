"""Fairness has known values, and is 1 for random batches."""

from __future__ import annotations

import random
from itertools import permutations
from math import sqrt
from statistics import fmean, stdev

import pytest

from millrace.core.fairness import (
    BATCHES,
    BATCHES_MIN,
    Figures,
    LengthMoments,
    Window,
    fairness,
    next_correlation,
    windows,
)


def batches(*lengths):
    return [LengthMoments.of(batch) for batch in lengths]


def test_fairness_has_the_value_worked_by_hand():
    """Means 3 and 7 round 5: between 2 * 4 + 2 * 4 = 16; groups 2, 4, 6, 8: variance 20 / 3."""
    assert fairness(batches([2, 4], [6, 8])) == pytest.approx(16 / (20 / 3))
    assert fairness(batches([2, 8], [4, 6])) == 0.0


def test_batches_of_one_length_each_have_the_fairness_of_their_size_in_the_limit():
    halves = batches(*[[1] * 8, [9] * 8] * 50)
    assert fairness(halves) == pytest.approx(8 * (100 * 8 - 1) / (8 * 99))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 3), (4, 2)])
def test_the_mean_over_every_way_to_make_batches_is_exactly_one(sizes):
    """The finite population: also of batches of different sizes."""
    groups, found = (1.0, 2.0, 4.0, 8.0, 16.0, 40.0), []
    for order in permutations(groups):
        parts, start = [], 0
        for size in sizes:
            parts.append(order[start : start + size])
            start += size
        found.append(fairness(batches(*parts)))
    assert fmean(found) == pytest.approx(1.0)


def test_random_batches_have_fairness_one_within_its_standard_error():
    rng, found, correlations = random.Random(5), [], []
    for _ in range(400):
        drawn = [LengthMoments.of([rng.lognormvariate(5, 1) for _ in range(8)]) for _ in range(BATCHES)]
        found.append(fairness(drawn))
        correlations.append(next_correlation(drawn))
    assert abs(fmean(found) - 1) < 3 * stdev(found) / sqrt(400)
    assert stdev(found) == pytest.approx(sqrt(2 / (BATCHES - 1)), rel=0.15)
    assert fmean(correlations) == pytest.approx(-1 / BATCHES, abs=3 * stdev(correlations) / sqrt(400))


def test_batches_that_alternate_are_unfair_and_neighbours_are_opposed():
    """Shortest half first, out of every two batches."""
    rng, drawn = random.Random(7), []
    for _ in range(200):
        two = sorted(rng.lognormvariate(5, 1) for _ in range(16))
        drawn += [LengthMoments.of(two[:8]), LengthMoments.of(two[8:])]
    assert fairness(drawn) > 2
    assert next_correlation(drawn) < -0.6


def test_neighbours_have_the_correlation_worked_by_hand():
    assert next_correlation(batches([1], [2], [3], [4])) == pytest.approx(1.0)
    assert next_correlation(batches([1], [3], [1], [3], [1])) == pytest.approx(-1.0)


def test_too_few_batches_and_equal_lengths_have_no_figures():
    assert fairness([]) is None and fairness(batches([1, 2])) is None
    assert next_correlation(batches([1], [2])) is None
    even = batches(*[[0.1 + 0.2, 0.3]] * 5)
    assert fairness(even) is None and next_correlation(even) is None


def test_a_window_has_figures_from_the_least_number_of_batches_on():
    window = Window()
    for version in range(1, BATCHES_MIN):
        window.add(version, LengthMoments.of([version, 2 * version]), {1: 3})
    assert window.figures() == Figures(BATCHES_MIN - 1)
    window.add(BATCHES_MIN, LengthMoments.of([1, 2]), {0: 3})
    figures = window.figures()
    assert figures.batches == BATCHES_MIN and figures.fairness is not None and figures.next is not None
    assert figures.staleness_mean == pytest.approx((BATCHES_MIN - 1) / BATCHES_MIN)


def test_a_window_forgets_old_batches_and_counts_a_replayed_one_once():
    window, last = Window(), []
    for version in range(1, 3 * BATCHES):
        lengths = LengthMoments.of([version % 7, version % 5 + 3])
        for _ in range(2):
            window.add(version, lengths, {version % 3: 10})
        last.append(lengths)
    figures = window.figures()
    assert figures.batches == BATCHES
    assert figures.fairness == fairness(last[-BATCHES:])
    assert figures.next == next_correlation(last[-BATCHES:])


def test_windows_are_whole_and_end_with_the_last_batch():
    drawn = batches(*[[i, i + 1] for i in range(2 * BATCHES + 5)])
    last, before = windows(drawn)
    assert (last, before) == (drawn[-BATCHES:], drawn[5:-BATCHES])
    assert windows(drawn[: BATCHES - 1]) == []


def test_lengths_that_drift_are_fair_window_by_window_and_not_as_one():
    rng = random.Random(11)
    drawn = [LengthMoments.of([rng.gauss(30 + 0.05 * i, 10) for _ in range(8)]) for i in range(10 * BATCHES)]
    assert fmean(fairness(part) for part in windows(drawn)) == pytest.approx(1, abs=0.2)
    assert fairness(drawn) > 2


def test_lengths_of_any_unit_have_the_same_fairness():
    rng = random.Random(1)
    drawn = [[rng.expovariate(0.01) for _ in range(4)] for _ in range(20)]
    small, large = (batches(*[[x * unit for x in b] for b in drawn]) for unit in (1e-3, 1e6))
    assert fairness(small) == pytest.approx(fairness(large))
    assert next_correlation(small) == pytest.approx(next_correlation(large))
