"""The millrace preset under the real controller, with everything that can go wrong."""

import pytest

from millrace.config.schema import Millrace
from millrace.sim.explore_worlds import random_world, small_config
from millrace.sim.invariants import Invariants
from millrace.sim.simulation import simulate


@pytest.mark.parametrize("schedule", [Millrace(repack_interval_s=0.5), Millrace(staleness_max=None)])
def test_no_fault_breaks_an_invariant(schedule):
    for seed in range(12):
        config = small_config(schedule, steps=5, replicas=1 + seed % 4, seed=seed)
        world = random_world(seed, config)
        outcome = simulate(world, Invariants(world))
        assert outcome.accounting.trained >= 5 * config.batch.prompts * 2
