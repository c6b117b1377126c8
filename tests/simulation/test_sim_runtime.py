from __future__ import annotations

from functools import partial

import pytest

import millrace_sim
from millrace_sim.virtual.sim_runtime import SimRuntime
from tests.conformance import SCENARIOS, Scenario


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_sim_runtime_conforms(scenario: Scenario, seed: int) -> None:
    millrace_sim.run(scenario(partial(SimRuntime, seed)), seed=seed)
