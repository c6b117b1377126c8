"""The millrace preset under the real controller, with everything that can go wrong."""

import pytest

from millrace.config.schema import Millrace
from millrace.sim.explore import try_seed
from millrace.sim.explore_worlds import small_config


@pytest.mark.parametrize("schedule", [Millrace(repack_interval_s=0.5), Millrace(staleness_max=None)])
def test_no_fault_breaks_an_invariant(schedule):
    ended = 0
    for seed in range(12):
        config = small_config(schedule, steps=5, replicas=1 + seed % 4, seed=seed)
        verdict = try_seed(seed, config=config)
        assert not verdict.problem, verdict
        ended += not verdict.noticed_corruption
    assert ended >= 10
