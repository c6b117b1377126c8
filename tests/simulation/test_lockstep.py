"""The benchmark's schedules of a fixed staleness keep it, however fast anything is."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config.tables.generation import Rollout
from millrace.config.tables.schedules import FunctionSchedule
from millrace.config.tables.training import BatchShape
from millrace.core.fairness import LengthMoments, fairness
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Observer, Scenario, simulate
from tests.long import covering, long

LOCKSTEP = Path(__file__).parents[2] / "benchmarks" / "lockstep.py"
STEPS = 24


class Steps(Observer):
    def __init__(self):
        self.seen = []

    def on_event(self, event):
        if event.kind == "step":
            self.seen.append(event.fields)


def steps(function, staleness_max, costs, steps=STEPS):
    schedule = FunctionSchedule(path=f"{LOCKSTEP}:{function}", staleness_max=staleness_max)
    rollout = Rollout(replicas=1, slots=24, max_sequence_tokens=256, report_interval_s=0.15)
    batch = BatchShape(prompts=4, group_size=3)
    config = small_config(schedule, steps=steps, rollout=rollout, batch=batch)
    watch = Steps()
    simulate(Scenario(config, costs=costs), watch)
    return watch.seen


SLOW_TRAINER, SLOW_REPLICA = Costs(step_base_s=5.0), Costs(step_base_s=1e-3)


@pytest.mark.parametrize(("staleness", "costs"), covering([0, 1, 2, 4], [SLOW_TRAINER, SLOW_REPLICA]))
def test_every_token_has_the_staleness_that_was_asked_for(staleness, costs):
    seen = steps("fixed", staleness, costs)
    histograms = [list(step["staleness_histogram"]) for step in seen]
    assert histograms == [[min(index, staleness)] for index in range(STEPS)]


@pytest.mark.parametrize(
    ("function", "costs"), covering(["in_order", "first_ready"], [SLOW_TRAINER, SLOW_REPLICA])
)
def test_rounds_of_two_batches_have_the_same_staleness_in_either_order(function, costs):
    seen = steps(function, 2, costs)
    histograms = [list(step["staleness_histogram"]) for step in seen]
    assert histograms == [[0], [1]] + [[1], [2]] * (STEPS // 2 - 1)


@long
def test_first_ready_is_unfair_and_in_order_is_not():
    fair, unfair = (
        fairness([LengthMoments(**step["lengths"]) for step in steps(name, 2, SLOW_REPLICA, steps=200)])
        for name in ("in_order", "first_ready")
    )
    assert 0.7 < fair < 1.3 < unfair
