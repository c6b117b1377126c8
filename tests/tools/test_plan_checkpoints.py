"""How often a plan saves, and that it says so."""

import math
from dataclasses import replace

import pytest
from tests.tools.test_plan_search import QUESTION, RESULT

from millrace_sim.costs.hardware import DEVICE_MTBF_H, device
from millrace_sim.costs.models import model
from millrace_sim.plan.layouts import Demand, layouts
from millrace_sim.plan.planned import checkpoints
from millrace_sim.plan.ranking import CheckpointCosts, Plan, best_interval, planned_interval

COSTS = CheckpointCosts(step_s=10.0, replay_s=10.0, stall_s=2.0)


def test_where_a_repeated_step_costs_a_step_the_interval_is_young_and_dalys() -> None:
    best = best_interval(COSTS, mtbf_s=10_000.0)
    assert best.every == round(math.sqrt(2 * 2.0 * 10_000.0) / 10.0) == 20
    assert best.interval_s == 200.0
    assert best.loss == pytest.approx(2 / 200 + 9.5 * 10 / 10_000)


def test_no_other_number_of_steps_loses_less() -> None:
    costs = replace(COSTS, replay_s=3.0)
    best = best_interval(costs, mtbf_s=4000.0)
    assert best.loss == min(costs.loss(every, 4000.0) for every in range(1, 200))


def test_frequent_failures_save_every_step_unless_a_save_takes_longer() -> None:
    assert best_interval(COSTS, mtbf_s=20.0).every == 1
    assert best_interval(replace(COSTS, save_s=35.0), mtbf_s=20.0).every == 4


def test_rare_failures_save_every_half_hour_at_most() -> None:
    assert best_interval(COSTS, mtbf_s=1e12).interval_s == 1800.0


def test_the_published_rate_is_a_failure_every_three_hours_of_its_cluster() -> None:
    assert pytest.approx(3.09, abs=0.01) == DEVICE_MTBF_H / 16_384


def test_a_plan_says_how_often_to_save() -> None:
    demand = Demand(samples=256, prompt_tokens=512, completion_tokens=1000, longest=4096)
    layout = layouts(model("Qwen2.5-7B"), {device("H100"): 16}, demand)[0]
    best = planned_interval(layout, RESULT, device_mtbf_h=layout.training.devices)  # once an hour
    assert best.mtbf_s == 3600.0
    assert best.every == 9  # sqrt(2 x 1.0 x 3600 / (10 x 9)) = 8.9
    answer = Plan(QUESTION, demand, [], 1, [], "the trainer", [], best)
    text = "checkpoints.every = 9 steps (90 s), expected loss 2.11%: a device of the trainer fails every 1 h"
    assert checkpoints(answer) == text
