"""Screening: the first trajectories of a group decide whether its rest starts, whatever the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.config.tables.schedules import AReaL, Synchronous
from millrace.config.tables.training import BatchShape
from millrace.core.errors import DataError
from millrace.core.types import State
from millrace.schedule.admit import screened_reward
from millrace_sim.costs.workload import Workload
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import SCHEDULES, small_config
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.faults import Failures, Faults
from tests.long import covering, few, long

CRASHES = Faults(
    failures=(Failures("trainer", 4.0), Failures("replica-*", 6.0)),
    controller_crashes=tuple(1.7 * i for i in range(1, 6)),
)
STEPS, GROUPS, SIZE, FIRST = 10, 2, 5, 2


class EveryGroup(Invariants):
    """Every group that ever started, as the ledger has it at the end."""

    def on_end(self, ledger, world):
        super().on_end(ledger, world)
        self.groups = [ledger.group(i) for i in range(ledger.recover().next_group_id)]


def run(schedule, *, faults=Faults(), first=FIRST, size=SIZE, colocated=False, **rows):
    batch = BatchShape(prompts=GROUPS, group_size=size, screen_samples=first)
    workload = replace(Workload(), **rows)
    config = small_config(schedule, steps=STEPS, batch=batch)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"colocated": colocated})})
    scenario = Scenario(config, faults=faults, workload=workload)
    watch = EveryGroup(scenario)
    return simulate(scenario, watch), watch.groups


@pytest.mark.parametrize(("schedule", "faults"), covering(SCHEDULES, [Faults(), CRASHES]))
def test_a_group_is_trained_whole_or_its_rest_never_starts(schedule, faults):
    outcome, groups = run(schedule, faults=faults)
    assert outcome.accounting.balanced
    assert outcome.accounting.trained == STEPS * GROUPS * SIZE
    trained = [g for g in groups if any(m.state is State.TRAINED for m in g.members)]
    ended = [g for g in groups if g.members[0].reason.startswith("screened out")]
    assert len(trained) == STEPS * GROUPS
    assert ended
    for group in trained:
        first = [m.reward for m in group.members[:FIRST]]
        assert screened_reward(first) is None
        assert all(m.state is State.TRAINED for m in group.members)
    for group in ended:
        assert screened_reward([m.reward for m in group.members[:FIRST]]) is not None
        assert all(m.lease == 0 and not m.columns for m in group.members[FIRST:])
        assert {m.state for m in group.members} == {State.REJECTED}


def test_the_events_of_steps_say_how_many_groups_were_screened_out_and_why():
    outcome, groups = run(Synchronous(), solved_fraction=0.5, hopeless_fraction=0.2)
    reasons = [g.members[0].reason for g in groups]
    counts = [step.get("groups_screened", {}) for step in outcome.of("step")]
    total = {name: sum(count.get(name, 0) for count in counts) for name in ("solved", "hopeless")}
    assert total["solved"] == sum("are 1" in reason for reason in reasons) > 0
    assert total["hopeless"] == sum("are 0" in reason for reason in reasons) > 0


@pytest.mark.parametrize("schedule", [Synchronous(), AReaL(eta=1)], ids=repr)
def test_on_one_device_in_turns_too_a_group_is_trained_whole(schedule):
    outcome, _ = run(schedule, colocated=True)
    assert outcome.accounting.balanced
    assert outcome.accounting.trained == STEPS * GROUPS * SIZE
    assert outcome.accounting.rejected


@pytest.mark.parametrize("schedule", few(SCHEDULES, 4), ids=repr)
def test_a_failed_score_is_no_reward_and_the_run_ends(schedule):
    outcome, groups = run(schedule, failed_fraction=0.3, abstained_fraction=0.1)
    assert outcome.accounting.balanced
    assert len(outcome.of("step")) == STEPS
    failed = [g for g in groups if g.members[0].state is State.FAILED]
    assert failed
    assert all(m.lease for g in failed for m in g.members[FIRST:]), "one reward alone says nothing"


@long
def test_rows_that_are_all_screened_out_end_the_run_with_an_error():
    with pytest.raises(DataError, match=r"1000 groups in a row were screened out.* are 1\n.*too hard"):
        run(Synchronous(), reward_mean=1.0)


def test_screening_gives_more_groups_with_a_signal_for_the_tokens_that_are_generated():
    def signal_per_token(first):
        rows = {"solved_fraction": 1 / 3, "hopeless_fraction": 1 / 3}
        _, groups = run(Synchronous(), first=first, size=16, **rows)
        tokens = sum(len(m.columns) for g in groups for m in g.members)
        rewards = [{m.reward for m in g.members if m.state is State.TRAINED} for g in groups]
        return sum(len(values) > 1 for values in rewards) / tokens

    assert signal_per_token(4) > 1.5 * signal_per_token(0)
