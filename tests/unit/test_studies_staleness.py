"""The study of staleness: its runs and their order, what they cost, and that no run is made twice."""

from __future__ import annotations

import pytest
import staleness_tables as tables
from staleness_costs import Outcome, collapsed, cost, steps_to, target
from staleness_design import CORRECTIONS, NONE, SIZES, arms, rate_runs, wanted
from staleness_results import StalenessResults
from staleness_runs import DESIGN
from study import RESULTS

RISING = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7, 0.7, 0.7]
SLOWER = [0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7, 0.7]
FALLING = [0.2, 0.3, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]


def summary(rewards, greedy=0.5):
    return {
        "rewards": [round(1000 * reward) for reward in rewards],
        "greedy": greedy,
        "ess": 1.0,
        "cpu_s": 10,
    }


def test_a_size_gets_its_rate_before_any_other_run_and_all_arms_of_a_seed_come_first():
    sizes, corrections = list(SIZES)[:2], list(CORRECTIONS)
    tried = rate_runs(sizes[0])
    assert list(wanted(sizes, range(2), corrections, {})) == tried
    rewards = {run: [run.rate] for run in tried}
    runs = list(wanted(sizes, range(2), corrections, rewards))
    own, num = runs[len(tried) : -len(rate_runs(sizes[1]))], len(arms(sizes[0], corrections))
    assert runs[-1] in rate_runs(sizes[1]) and len(own) == 2 * num and len(set(runs)) == len(runs)
    assert {run.rate for run in own} == {max(SIZES[sizes[0]].rates)}
    assert [(run.correction, run.staleness) for run in own[:num]] == arms(sizes[0], corrections)
    assert {run.seed for run in own[:num]} == {0} and own[0].staleness == 0


@pytest.mark.parametrize("size", SIZES)
def test_no_correction_is_run_at_every_staleness_and_the_others_where_they_are_compared(size):
    found, design = arms(size, list(CORRECTIONS)), SIZES[size]
    assert {staleness for name, staleness in found if name == NONE} == set(design.staleness)
    assert {arm for arm in found if arm[0] != NONE} == {
        (name, staleness) for name in design.corrections if name != NONE for staleness in design.corrected
    }
    low, high = design.corrected
    assert arms(size, ["tis"]) == [(NONE, 0), ("tis", high), ("tis", low)]


def test_a_size_with_one_rate_needs_no_run_to_choose_it():
    assert rate_runs("135m") == []
    runs = list(wanted(["135m"], [0], [NONE, "tis"], {}))
    assert [(run.correction, run.staleness) for run in runs] == arms("135m", [NONE, "tis"])
    assert {run.rate for run in runs} == set(SIZES["135m"].rates)


def test_steps_to_a_reward_are_where_the_smoothed_rewards_first_reach_it():
    assert target(RISING) == pytest.approx(0.6)
    assert steps_to(RISING, 0.6, every=4) == pytest.approx(16.0)
    assert steps_to(SLOWER, 0.6, every=4) == pytest.approx(20.0)
    assert steps_to(RISING, 0.65, every=4) == pytest.approx(19.0)
    assert steps_to(FALLING, 0.6, every=4) is None and steps_to(RISING, 0.1, every=4) == 0.0


def test_a_cost_is_within_a_seed_and_a_seed_that_never_arrives_counts_with_all_its_steps():
    base, slow, lost = Outcome(RISING, 0.8), Outcome(SLOWER, 0.7), Outcome(FALLING, 0.1)
    one = cost([(slow, base), (slow, base)], every=4)
    assert one.extra == (pytest.approx(4.0), pytest.approx(0.0)) and one.percent[0] == pytest.approx(25.0)
    assert (one.missed, one.collapsed, one.greedy_below[0]) == (0, 0, pytest.approx(0.1))
    other = cost([(slow, base), (lost, base)], every=4)
    assert (other.missed, other.collapsed, other.extra[0]) == (1, 1, pytest.approx((4 + 16) / 2))
    assert collapsed(FALLING) and not collapsed(SLOWER)


def test_a_finished_run_is_kept_and_results_of_another_design_are_refused(tmp_path):
    size, file = next(iter(SIZES)), tmp_path / "kept" / "staleness.json"
    first, second = rate_runs(size)[:2]
    one, other = (StalenessResults(file, "a") for _ in range(2))
    one.add(first, summary(RISING))
    other.add(second, summary(SLOWER))
    again = StalenessResults(file, "a")
    assert set(again.runs) == {first, second} and again.outcome(first) == Outcome(RISING, 0.5)
    assert first not in [run for run in wanted([size], [0], [NONE], again.rewards) if run not in again.runs]
    with pytest.raises(SystemExit, match="another design"):
        StalenessResults(file, "b")


def test_results_in_the_repository_are_of_the_design_and_give_tables_and_plots(tmp_path):
    results = StalenessResults(RESULTS / "staleness.json", DESIGN)
    assert results.runs and any("no correction" in line for line in tables.tables(results))
    tables.plots(results, tmp_path)
    assert list(tmp_path.glob("*.svg"))
