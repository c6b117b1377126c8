"""The real controller, schedules and ledger in virtual time."""

from __future__ import annotations

import pytest

from millrace.schedule.presets import build
from millrace.sim.simulation import Scenario, simulate
from tests.simulation.worlds import SCHEDULES, check_outcome, check_state, config, stormy

SEEDS = range(200)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_calm_run_trains_everything_it_admits(schedule):
    scenario = Scenario(config(schedule))
    outcome = simulate(scenario, check_state)
    check_outcome(scenario, outcome)
    accounting = outcome.accounting
    assert (accounting.trained, accounting.in_flight) == (accounting.admitted, 0)
    assert outcome.restarts == 0


@pytest.mark.parametrize("first", range(0, len(SEEDS), 20))
def test_no_storm_breaks_a_promise(first):
    for seed in SEEDS[first : first + 20]:
        scenario = stormy(seed)
        try:
            check_outcome(scenario, simulate(scenario, check_state))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {build(scenario.config).kind}: {error!r}") from error


def test_the_same_seed_gives_the_same_trace():
    assert simulate(stormy(3)).digest == simulate(stormy(3)).digest != simulate(stormy(4)).digest
