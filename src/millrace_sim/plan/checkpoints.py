"""How often to save: the stall of a checkpoint, against the steps that a death of the trainer repeats.

Every `n` steps of `s` seconds, with a stall of `C` and a mean time between failures of `M`, the loss is

    C / (n s)  +  (n - 1) / 2 * r / M,        n* = sqrt(2 C M / (s r))

`r` is what one repeated step costs. Where a repeated step costs what a step costs (r = s), n* s is the
optimum of Young (1974) and Daly (2006), sqrt(2 C M). Here r is less: the batches are in the ledger, so that
nothing is generated again. What a failure costs at any interval is left out: a restart, the step under way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace_sim.costs.cluster import Cluster
from millrace_sim.measure import Result
from millrace_sim.plan.layouts import PlanLayout

INTERVAL_S_MAX = 1800.0
"""A stall of seconds in half an hour costs next to nothing, and people and software end runs too."""


@dataclass(frozen=True, slots=True)
class CheckpointCosts:
    """Seconds. `replay_s`: a repeated step. `save_s`: until a checkpoint is complete."""

    step_s: float
    replay_s: float
    stall_s: float
    save_s: float = 0.0

    def loss(self, every: int, mtbf_s: float) -> float:
        """Share of the time that saving every `every` steps loses."""
        return self.stall_s / (every * self.step_s) + (every - 1) / 2 * self.replay_s / mtbf_s


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Save every `every` steps, which are `interval_s` seconds. `loss` is a share of the time."""

    every: int
    interval_s: float
    loss: float
    mtbf_s: float


def best_interval(costs: CheckpointCosts, mtbf_s: float) -> CheckpointPlan:
    """The number of steps with the least loss, at most `INTERVAL_S_MAX` long. A checkpoint is complete before
    the next one begins."""
    best = math.sqrt(2 * costs.stall_s * mtbf_s / (costs.step_s * max(costs.replay_s, 1e-9)))
    least = max(1, math.ceil(costs.save_s / costs.step_s))
    most = max(least, math.floor(INTERVAL_S_MAX / costs.step_s))
    near = {min(max(least, whole), most) for whole in (math.floor(best), math.ceil(best))}
    every = min(near, key=lambda one: (costs.loss(one, mtbf_s), one))
    return CheckpointPlan(every, every * costs.step_s, costs.loss(every, mtbf_s), mtbf_s)


def planned_interval(layout: PlanLayout, result: Result, device_mtbf_h: float) -> CheckpointPlan:
    """For a simulated layout: its time of a step, the trainer's part of that, and its devices."""
    costs = Cluster(layout.generation, layout.training, layout.replicas).costs(1)
    seconds = CheckpointCosts(
        result.step_s, result.trainer_busy * result.step_s, costs.snapshot_s, costs.save_s
    )
    return best_interval(seconds, device_mtbf_h * 3600 / layout.training.devices)
