"""A relay that holds two versions is enough for a run, whatever the staleness bound."""

from __future__ import annotations

import pytest

from millrace.config.tables.operation import Weights
from millrace.config.tables.schedules import AReaL, Laminar, Millrace, Schedule
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Failures, Faults
from tests.long import few, long

SCHEDULES = [AReaL(eta=4), Laminar(staleness_max=4), Millrace(staleness_max=4)]
STEPS = 40


def run(schedule: Schedule, slots: int, seed: int) -> Outcome:
    """Replicas die again and again, and leave trajectories of versions that may be gone."""
    config = small_config(schedule, steps=STEPS, seed=seed, weights=Weights(slots=slots))
    return simulate(Scenario(config, faults=Faults(failures=(Failures("replica-*", mtbf_s=3.0),))))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
@pytest.mark.parametrize("seed", few(range(2)))
def test_a_run_with_two_versions_under_a_bound_of_four_trains_everything(
    schedule: Schedule, seed: int
) -> None:
    outcome, whole = run(schedule, 2, seed), small_config(schedule).trajectories_per_step * STEPS
    steps = outcome.of("step")
    assert len(steps) == STEPS
    assert max(step["staleness_max"] for step in steps) <= 4
    assert outcome.accounting.trained == outcome.accounting.admitted == whole


@long
@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda schedule: schedule.kind)
def test_what_has_lost_its_version_starts_again_which_more_versions_spare_it(schedule: Schedule) -> None:
    assert run(schedule, 2, 1).of("restarted")
    assert not run(schedule, 7, 1).of("restarted")
