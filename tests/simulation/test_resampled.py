"""Groups whose rewards are all equal are replaced, whatever the schedule, and the accounts close."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.schedules import Synchronous
from millrace.controller.state.trajectories import NO_SIGNAL
from millrace_sim.costs.workload import Workload
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import SCHEDULES, small_config
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.faults import Failures, Faults
from tests.long import few

CRASHES = Faults(
    failures=(Failures("trainer", 4.0), Failures("replica-*", 6.0)),
    controller_crashes=tuple(1.7 * i for i in range(1, 6)),
)
STEPS, GROUPS, SIZE = 10, 2, 3


class OnlySignal(Invariants):
    """Which groups were trained, and what ended."""

    def on_end(self, ledger, world):
        super().on_end(ledger, world)
        steps = ledger.steps_after(0)
        groups = [ledger.group(group_id) for step in steps for group_id in step.group_ids]
        self.trained = [{m.reward for m in g.members if m.trained_version} for g in groups]


def run(schedule, *, faults=Faults(), reward_mean=0.5, algorithm=PolicyGradient(kind="dapo", overlong=0.0)):
    scenario = Scenario(
        small_config(schedule, steps=STEPS, algorithm=algorithm),
        faults=faults,
        workload=replace(Workload(), reward_mean=reward_mean),
    )
    watch = OnlySignal(scenario)
    return simulate(scenario, watch), watch


@pytest.mark.parametrize("faults", few([CRASHES, Faults()]))
@pytest.mark.parametrize("schedule", few(SCHEDULES, 3), ids=repr)
def test_every_trained_group_has_a_signal_and_the_accounts_close(schedule, faults):
    outcome, watch = run(schedule, faults=faults)
    assert len(watch.trained) == STEPS * GROUPS
    assert all(len(rewards) > 1 for rewards in watch.trained)
    assert outcome.accounting.balanced
    assert outcome.accounting.trained == STEPS * GROUPS * SIZE
    assert outcome.accounting.rejected >= SIZE
    ends = {e["reason"] for e in outcome.of("ended") if e["state"] == "rejected"}
    assert ends == {NO_SIGNAL}
    assert not outcome.of("warned")


@pytest.mark.parametrize("schedule", few(SCHEDULES, 3), ids=repr)
def test_where_no_group_has_a_signal_the_run_goes_on_at_a_bounded_cost_and_says_so(schedule):
    outcome, watch = run(schedule, reward_mean=1.0, algorithm=PolicyGradient(resample=3))
    assert len(watch.trained) == STEPS * GROUPS
    assert outcome.accounting.rejected <= 3 * GROUPS * SIZE * (STEPS + 1)
    (warned,) = outcome.of("warned")
    assert warned["source"] == "algorithm.resample"
    assert "6 groups" in warned["reason"]


def test_without_it_such_groups_are_trained():
    outcome, watch = run(Synchronous(), algorithm=PolicyGradient())
    assert outcome.accounting.rejected == 0
    assert any(len(rewards) == 1 for rewards in watch.trained)
