"""Distributions of completion lengths: medians, tails, and that a draw depends on its ids alone."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from millrace.core.errors import ConfigError
from millrace.core.types import Finish
from millrace_sim.costs.workload import Drift, Empirical, LogNormal, Mixture, Turns, Workload

COUNT = 4000


def draws(lengths, seed=1):
    return [lengths.draw(seed, i) for i in range(COUNT)]


def test_a_log_normal_has_the_percentiles_that_it_was_made_from():
    values = sorted(draws(LogNormal.from_percentiles(1000.0, 10_000.0)))
    assert median(values) == pytest.approx(1000, rel=0.05)
    assert values[int(0.99 * COUNT)] == pytest.approx(10_000, rel=0.2)


def test_an_empirical_distribution_stays_within_what_was_observed():
    lengths = Empirical.of([30, 10, 20])
    values = draws(lengths)
    assert min(values) >= 10
    assert max(values) <= 30
    assert fmean(values) == pytest.approx(20, rel=0.03)
    with pytest.raises(ConfigError, match="no completion"):
        Empirical.of([])


def test_a_mixture_takes_each_part_as_often_as_its_weight_says():
    lengths = Mixture(((3.0, LogNormal(10.0, 0.0)), (1.0, LogNormal(1000.0, 0.0))))
    assert sum(value > 100 for value in draws(lengths)) / COUNT == pytest.approx(0.25, abs=0.03)


def test_drift_multiplies_lengths_as_training_goes_on_and_then_stops():
    lengths = Drift(LogNormal(100.0, 0.0), factor=3.0, trajectories=100)
    assert [lengths.draw(0, i) for i in (0, 50, 100, 5000)] == pytest.approx([100, 200, 300, 300])


def test_turns_add_up_with_the_replies_between_them():
    lengths = Turns(LogNormal(100.0, 0.0), mean_turns=4.0, reply_tokens=50.0)
    values = draws(lengths)
    assert {round(value - 100) % 150 for value in values} == {0}
    assert fmean(values) == pytest.approx(4 * 100 + 3 * 50, rel=0.06)


def test_a_draw_depends_on_the_seed_and_the_trajectory_alone():
    lengths = LogNormal(100.0, 1.0)
    assert draws(lengths) == draws(lengths) != draws(lengths, seed=2)


def test_a_coarse_workload_has_the_same_lengths_in_larger_units():
    fine = Workload(completion=LogNormal(4000.0, 0.5))
    coarse = Workload(completion=LogNormal(4000.0, 0.5), quantum=64)
    for i in range(50):
        exact, _ = fine.completion_length(0, i, 10**6)
        units, _ = coarse.completion_length(0, i, 10**6)
        assert abs(exact - 64 * units) <= 32
    assert coarse.completion_length(0, 0, 3) == (3, Finish.LENGTH)
