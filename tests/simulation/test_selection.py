"""Rows that rest, in whole runs: the accounts close, and a killed run draws what another one draws."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import fmean

import pytest

from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.generation import Rollout
from millrace.config.tables.schedules import Millrace, Synchronous
from millrace.config.tables.task import RestSelection, SignalSelection
from millrace.config.tables.training import BatchShape
from millrace.controller.row_selection import RowSelection
from millrace.core.completion.columns import token_array
from millrace.core.errors import DigestMismatchError
from millrace.core.fairness import BAND, LengthMoments, fairness, windows
from millrace.core.types import RESTS, Prompt
from millrace_sim.costs.workload import LogNormal, RowDifficulty, Workload
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import SCHEDULES, random_world, small_config
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.faults import Failures, Faults
from tests.long import few, long

STEPS, GROUPS, SIZE = 16, 2, 3
REST, SIGNAL = RestSelection(groups=1, retry=0.2), SignalSelection(retry=0.2)
ROWS = Workload(difficulty=RowDifficulty(rows=6, group_size=SIZE, spread=3.0))
CRASHES = Faults(
    failures=(Failures("trainer", 9.0), Failures("replica-*", 6.0), Failures("reward-worker-*", 8.0)),
    controller_crashes=tuple(0.9 * i for i in range(1, 40)),
)


class Stream(Invariants):
    """What became of each position of the stream, and the steps that were trained."""

    def on_end(self, ledger, world):
        super().on_end(ledger, world)
        self.next_group_id = ledger.recover().next_group_id
        self.steps = ledger.steps_after(0)
        self.outcomes = [ledger.outcomes(step) for step in self.steps]
        self.groups = dict(ledger._db.execute("SELECT group_id, row_id FROM groups"))
        rows = ledger._db.execute("SELECT group_id, row_id, reason FROM skipped ORDER BY group_id")
        self.skipped = {group_id: (row_id, reason) for group_id, row_id, reason in rows}


def run(schedule, selection, *, faults=Faults(), workload=ROWS, steps=STEPS, **changes):
    config = small_config(schedule, steps=steps, selection=selection, **changes)
    scenario = Scenario(config, faults=faults, workload=workload)
    watch = Stream(scenario)
    return simulate(scenario, watch), watch


@pytest.mark.parametrize("selection, faults", [(SIGNAL, Faults()), (REST, CRASHES)], ids=["calm", "crashes"])
@pytest.mark.parametrize("schedule", few(SCHEDULES, 2), ids=repr)
def test_every_position_is_a_group_or_skipped_and_the_accounts_close(schedule, selection, faults):
    outcome, watch = run(schedule, selection, faults=faults)
    assert outcome.accounting.balanced and outcome.accounting.trained == STEPS * GROUPS * SIZE
    assert watch.groups.keys().isdisjoint(watch.skipped)
    assert sorted([*watch.groups, *watch.skipped]) == list(range(watch.next_group_id))
    assert watch.skipped and all(reason.startswith(RESTS) for _, reason in watch.skipped.values())
    if not faults.controller_crashes:
        assert len(outcome.of("rested")) == len(watch.skipped) and not outcome.of("skipped")


@pytest.mark.parametrize("selection", [REST, SIGNAL], ids=["rest", "signal"])
@pytest.mark.parametrize("every_s", few([0.35, 0.9, 1.7, 4.3]))
def test_a_synchronous_run_that_is_killed_at_many_points_draws_and_skips_the_same_groups(selection, every_s):
    crashes = Faults(controller_crashes=tuple(every_s * i for i in range(1, 30)))
    (_, calm), (killed, again) = (run(Synchronous(), selection, faults=f) for f in (Faults(), crashes))
    assert killed.resumes >= 3
    assert again.steps == calm.steps and again.outcomes == calm.outcomes
    last = max(calm.steps[-1].group_ids)
    assert {i: s for i, s in again.skipped.items() if i < last} == {
        i: s for i, s in calm.skipped.items() if i < last
    }


@pytest.mark.parametrize("schedule", few(SCHEDULES, 2), ids=repr)
def test_each_skip_can_be_computed_again_from_the_ledger(schedule):
    _, watch = run(schedule, SIGNAL, faults=CRASHES)
    known = RowSelection(SIGNAL, 0)
    versions = {group_id: int(reason.rpartition(" ")[2]) for group_id, (_, reason) in watch.skipped.items()}
    assert list(versions.values()) == sorted(versions.values())
    version = 0
    for group_id, (row_id, reason) in watch.skipped.items():
        while version < versions[group_id]:
            version += 1
            known.take_in(version, watch.outcomes[version - 1])
        assert known.why_rests(Prompt(group_id, row_id, token_array([1]), "")) == reason


@long
def test_solved_and_hopeless_rows_are_trained_less_and_are_tried_again():
    size = BatchShape(prompts=2, group_size=8)
    extreme = replace(ROWS, difficulty=RowDifficulty(rows=24, group_size=8, spread=6.0))
    _, everything = run(Synchronous(), None, steps=60, workload=extreme, batch=size)
    _, chosen = run(Synchronous(), RestSelection(groups=1), steps=60, workload=extreme, batch=size)

    def without_signal(watch):
        return sum(len(set(one.rewards)) == 1 for step in watch.outcomes for one in step)

    assert not everything.skipped
    assert without_signal(chosen) < 0.75 * without_signal(everything)
    rested = {row_id for row_id, _ in chosen.skipped.values()}
    late = {one.row_id for step in chosen.outcomes[40:] for one in step}
    assert rested & late


def test_where_every_row_is_solved_the_run_goes_on():
    solved = replace(ROWS, difficulty=RowDifficulty(rows=6, group_size=SIZE, spread=0.0, gain=50.0))
    outcome, watch = run(Synchronous(), RestSelection(groups=1, retry=0.01), workload=solved, steps=8)
    assert outcome.accounting.trained == 8 * GROUPS * SIZE
    assert len(watch.skipped) > 100


@pytest.mark.parametrize("seed", few(range(20), 4))
def test_random_worlds_keep_every_promise_with_selection(seed):
    scenario = random_world(seed)
    size = scenario.config.batch.group_size
    selection = REST if seed % 2 else SIGNAL
    scenario = replace(
        scenario,
        config=scenario.config.model_copy(update={"selection": selection}),
        workload=replace(scenario.workload, difficulty=RowDifficulty(rows=5, group_size=size)),
    )
    with suppress(DigestMismatchError):  # a corrupted copy ends a run
        simulate(scenario, Invariants(scenario))


def test_selection_is_refused_where_groups_without_signal_are_not_trained():
    with pytest.raises(ValueError, match=r"and `algorithm.resample` [(]10[)] ends groups"):
        small_config(Synchronous(), selection=REST, algorithm=PolicyGradient(kind="dapo", overlong=0.0))
    small_config(
        Synchronous(), selection=REST, algorithm=PolicyGradient(kind="dapo", overlong=0.0, resample=0)
    )
    with pytest.raises(ValueError, match=r"and `batch.screen_samples` [(]2[)] ends groups"):
        small_config(
            Synchronous(), selection=REST, batch=BatchShape(prompts=2, group_size=4, screen_samples=2)
        )


@long
@pytest.mark.parametrize("schedule", [Synchronous(), Millrace()], ids=lambda schedule: schedule.kind)
def test_batches_are_as_fair_as_without_selection_and_have_more_signal(schedule):
    """The world of docs/data.md. Harder rows have longer completions."""
    rows = RowDifficulty(rows=64, group_size=8, spread=4, gain=0.15, longer=0.4)
    world = Workload(completion=LogNormal(30.0, 0.3), difficulty=rows)
    shape = {
        "batch": BatchShape(prompts=8, group_size=8),
        "rollout": Rollout(replicas=3, slots=24, max_sequence_tokens=256, report_interval_s=0.15),
    }
    signal = []
    for selection in (None, RestSelection()):
        outcome, watch = run(schedule, selection, workload=world, steps=96, **shape)
        moments = [LengthMoments(**step["lengths"]) for step in outcome.of("step")][32:]
        figures = [fairness(window) for window in windows(moments)]
        assert BAND[0] < fmean(figures) < BAND[1]
        trained = [one for step in watch.outcomes[32:] for one in step]
        signal.append(fmean(len(set(one.rewards)) > 1 for one in trained))
    assert signal[1] > signal[0] + 0.1
