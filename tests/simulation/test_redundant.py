"""More starts than is needed: the first that are complete are trained, and the accounts of the rest close."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.config.tables.schedules import Heddle, Millrace, RollFlash, RollPacker, StaleFlow, StreamRL
from millrace.config.tables.training import BatchShape
from millrace.controller.group_ends import PARKED, REDUNDANT_GROUP
from millrace.controller.state.trajectories import REDUNDANT
from millrace.core.errors import DigestMismatchError
from millrace.core.types import State
from millrace_sim.costs.workload import LogNormal
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import random_world, small_config, with_turns
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.faults import Failures, Faults
from tests.long import covering, few

CRASHES = Faults(
    failures=(Failures("trainer", 4.0), Failures("replica-*", 6.0)),
    controller_crashes=tuple(1.7 * i for i in range(1, 6)),
)
STEPS, GROUPS, SIZE = 6, 2, 3
PRESETS = (
    RollFlash(),
    RollFlash(alpha=0, redundant_samples=2, redundant_groups=2),
    RollFlash(alpha=1, mix="between"),
    RollFlash(alpha=1, redundant_samples=0, redundant_groups=3, mix="never"),
    RollPacker(redundant_groups=1),
    StreamRL(),
    StreamRL(mix="never"),
    Millrace(mix="never"),
    Millrace(staleness_max=0, redundant_samples=2, redundant_groups=2),
    Millrace(redundant_samples=1, redundant_groups=1, mix="never"),
    Millrace(staleness_max=None, redundant_samples=1, redundant_groups=3),
    StaleFlow(staleness_max=1),
    Heddle(),
    Heddle(staleness_max=2),
)


class EveryGroup(Invariants):
    """Every group that ever started, as the ledger has it at the end."""

    def on_end(self, ledger, world):
        super().on_end(ledger, world)
        self.groups = [ledger.group(i) for i in range(ledger.recover().next_group_id)]


def run(schedule, *, faults=Faults(), turns=True):
    batch = BatchShape(prompts=GROUPS, group_size=SIZE)
    scenario = Scenario(small_config(schedule, steps=STEPS, batch=batch), faults=faults)
    scenario = with_turns(scenario) if turns else scenario
    watch = EveryGroup(scenario)
    return simulate(scenario, watch), [g for g in watch.groups if g.members]


@pytest.mark.parametrize(("schedule", "faults"), covering(PRESETS, [Faults(), CRASHES]))
def test_a_batch_has_the_first_complete_trajectories_and_the_rest_ends_with_a_reason(schedule, faults):
    outcome, groups = run(schedule, faults=faults)
    assert outcome.accounting.balanced and not outcome.accounting.in_flight
    assert outcome.accounting.trained == STEPS * GROUPS * SIZE
    redundant = getattr(schedule, "redundant_samples", 0)
    for group in groups:
        assert len(group.members) == SIZE + redundant
        ended = [m for m in group.members if m.state is not State.TRAINED]
        assert len(ended) in (redundant, len(group.members))
        assert {m.reason for m in ended} <= {REDUNDANT, REDUNDANT_GROUP}
        assert all(m.state is State.REJECTED for m in ended)


def test_groups_beyond_a_synchronous_batch_end_when_the_batch_is_taken():
    outcome, groups = run(RollFlash(alpha=0, redundant_samples=0, redundant_groups=2), turns=False)
    ended = [g for g in groups if g.members[0].reason == REDUNDANT_GROUP]
    assert len(ended) == 2 * STEPS
    assert outcome.accounting.rejected == 2 * STEPS * SIZE


def test_what_a_short_round_leaves_behind_is_trained_in_a_long_one():
    outcome, groups = run(RollPacker(redundant_samples=1, redundant_groups=1), turns=False)
    again = {e["trajectory_id"] for e in outcome.of("restarted") if e["reason"] == PARKED}
    trained = [{m.trajectory_id for m in g.members if m.state is State.TRAINED} for g in groups]
    assert sum(bool(ids & again) for ids in trained) >= 2
    assert all(not ids or len(ids) == SIZE for ids in trained)
    assert outcome.accounting.balanced and not outcome.accounting.in_flight


class FirstGroupIsSlow:
    """Lengths: the first group, or only its first trajectory, is far longer than all others."""

    def __init__(self, num_slow):
        self._num_slow = num_slow

    def draw(self, seed, trajectory_id):
        return 150.0 if trajectory_id < self._num_slow else 5.0


def first_step_s(schedule, num_slow):
    batch = BatchShape(prompts=GROUPS, group_size=SIZE)
    scenario = Scenario(small_config(schedule, steps=STEPS, batch=batch))
    scenario = replace(scenario, workload=replace(scenario.workload, completion=FirstGroupIsSlow(num_slow)))
    outcome = simulate(scenario)
    assert outcome.accounting.balanced and not outcome.accounting.in_flight
    return next(e.time_s for e in outcome.events if e.kind == "published" and e.fields["version"] == 1)


def test_with_redundancy_a_straggler_delays_no_step_of_millrace():
    """Under the bound 0 the trainer would wait for it."""
    quick = first_step_s(Millrace(staleness_max=0), num_slow=0)
    slow = first_step_s(Millrace(staleness_max=0), num_slow=1)
    assert slow > 1.8 * quick
    assert first_step_s(Millrace(staleness_max=0, redundant_samples=1), num_slow=1) < 1.2 * quick
    assert first_step_s(Millrace(staleness_max=0, redundant_groups=1), num_slow=SIZE) < 1.2 * quick


def test_without_redundancy_millrace_decides_as_without_the_keys():
    keys = Millrace(redundant_samples=0, redundant_groups=0)
    assert keys == Millrace()
    outcome, groups = run(keys)
    assert outcome.accounting.rejected == 0 and len(groups) == STEPS * GROUPS


def test_redundancy_trains_sooner_and_on_shorter_trajectories():
    def trained(schedule):
        outcome, groups = run(schedule)
        members = [m for g in groups for m in g.members if m.state is State.TRAINED]
        return outcome.wall_s, sum(len(m.columns) for m in members) / len(members)

    plain = trained(RollFlash(alpha=1, redundant_samples=0, redundant_groups=0))
    more = trained(RollFlash(alpha=1, redundant_samples=3, redundant_groups=0))
    assert more[0] < 0.8 * plain[0]
    assert more[1] < plain[1]


@pytest.mark.parametrize("seed", few(range(2 * len(PRESETS)), 2))
def test_no_storm_breaks_a_promise_to_an_episode_under_these_presets(seed):
    scenario = with_turns(random_world(seed))
    config = scenario.config
    batch = config.batch.model_copy(update={"screen_samples": 0})
    config = config.model_copy(update={"schedule": PRESETS[seed % len(PRESETS)], "batch": batch})
    scenario = replace(scenario, config=config)
    promises = Invariants(scenario)
    try:
        outcome = simulate(scenario, promises)
    except DigestMismatchError:
        assert promises.num_corrupted
        return
    assert outcome.accounting.balanced and not outcome.accounting.in_flight


def test_a_group_whose_environments_answer_late_is_trained_without_them():
    scenario = with_turns(Scenario(small_config(RollFlash(redundant_samples=0), steps=STEPS)))
    reward = scenario.config.reward.model_copy(update={"group_wait_s": 8.0})
    scenario = replace(scenario, config=scenario.config.model_copy(update={"reward": reward}))
    scenario = replace(scenario, workload=replace(scenario.workload, tool_s=LogNormal(1.0, 1.5)))
    watch = EveryGroup(scenario)
    outcome = simulate(scenario, watch)
    late = [m for g in watch.groups for m in g.members if "`reward.group_wait_s` (8 s)" in m.reason]
    assert late and all(m.state is State.FAILED for m in late)
    assert outcome.accounting.balanced and not outcome.accounting.in_flight
