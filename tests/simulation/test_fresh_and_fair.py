"""How far ahead generation runs, and whether batches are fair samples, under the real controller."""

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from millrace.checks.rehearsal import Scene, rehearse
from millrace.config.tables.generation import Rollout
from millrace.config.tables.operation import Checkpoints
from millrace.config.tables.schedules import Millrace
from millrace.config.tables.training import BatchShape
from millrace.controller.state.run_state import RunState
from millrace.schedule import presets
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import Drift, LogNormal, Workload
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.verdicts import try_seed
from millrace_sim.explore.worlds import small_config
from millrace_sim.measure import measure
from millrace_sim.simulation import Scale, Scenario, simulate
from millrace_sim.virtual.faults import Failures, Faults
from tests.long import few, long

BOUND, STEPS, PROMPTS, MEMBERS = 4, 40, 16, 4
TRAINER_BOUND_S, GENERATION_BOUND_S = 3.0, 0.3


def scenario(*, replicas=8, step_s=GENERATION_BOUND_S, seed=0, steps=STEPS, drift=1.0, **changes):
    lengths = LogNormal(30.0, 0.8, shared=0.5, group_size=MEMBERS)
    drifting = Drift(lengths, drift, steps * PROMPTS * MEMBERS)
    config = small_config(
        Millrace(staleness_max=BOUND, repack_interval_s=0.5),
        steps=steps,
        seed=seed,
        batch=BatchShape(prompts=PROMPTS, group_size=MEMBERS),
        rollout=Rollout(
            replicas=replicas,
            slots=max(MEMBERS, 256 // replicas),
            max_sequence_tokens=256,
            report_interval_s=0.15,
        ),
        checkpoints=Checkpoints(every=10),
    )
    return Scenario(
        config,
        seed=seed,
        costs=Costs(
            step_base_s=step_s, train_per_token_s=0.0, decode_base_s=0.02, decode_per_sequence_s=0.0002
        ),
        workload=Workload(completion=drifting),
        scale=Scale(isolate=False, keep_events=frozenset()),
        **changes,
    )


@cache
def measured(**changes):
    return measure(scenario(**changes))[0]


@pytest.mark.parametrize("replicas", few([1, 2, 8, 128], 2))
def test_with_a_slow_trainer_one_batch_ahead_is_enough(replicas):
    result = measured(replicas=replicas, step_s=TRAINER_BOUND_S, steps=20)
    assert result.staleness_mean < 1.3
    assert result.trainer_waits < 0.25


@long
@pytest.mark.parametrize(
    "faults",
    [Faults(failures=(Failures("replica-*", 20.0),)), Faults(controller_crashes=(15.0, 60.0))],
    ids=["replicas die", "the run is resumed"],
)
def test_after_a_death_and_after_a_resume_too(faults):
    watch = scenario(step_s=TRAINER_BOUND_S, steps=24, faults=faults)
    assert measure(watch)[0].staleness_mean < 1.3


@long
def test_completions_that_grow_are_answered_by_running_further_ahead():
    same, grown = (measured(step_s=1.0, drift=drift) for drift in (0.2, 3.0))
    assert same.staleness_mean < grown.staleness_mean <= BOUND


@long
def test_slow_generation_leaves_half_of_the_bound_to_stragglers():
    result = measured(seed=0)
    assert result.staleness_mean < BOUND - 0.5
    assert result.staleness_max <= BOUND


@long
def test_batches_are_fair_samples_from_the_first_on():
    found = [measured(seed=seed).fairness for seed in range(3)]
    assert 0.5 < fmean(found) < 1.3


@pytest.mark.parametrize("ahead", few([None, 1.0, 3.0]))
def test_with_faults_the_bound_holds_and_nobody_starves(ahead):
    for seed in range(8):
        schedule = Millrace(staleness_max=seed % 5, ahead=ahead, repack_interval_s=0.5)
        config = small_config(schedule, steps=5, replicas=1 + seed % 4, seed=seed)
        verdict = try_seed(seed, config=config)
        assert not verdict.problem, verdict


def test_every_admitted_group_is_trained_or_told():
    watched = scenario(steps=12, faults=Faults(failures=(Failures("replica-*", 10.0),)))
    watched = replace(watched, workload=replace(watched.workload, failed_fraction=0.05))
    accounting = simulate(watched, Invariants(watched)).accounting
    assert accounting.failed and accounting.balanced
    assert accounting.in_flight == accounting.stale == accounting.abandoned == 0


def test_no_order_of_events_breaks_a_promise():
    for seed in range(60):
        bound = seed % 5
        played = presets.millrace(Millrace(staleness_max=bound, ahead=(None, 1.0, 2.5)[seed % 3]))
        stage = Scene(
            batch_groups=1 + seed % 5, replicas=1 + seed % 4, group_duration_batches=(0.1, 1.0, 9.0)[seed % 3]
        )
        stage = replace(stage, crash_probability=0.01, fail_probability=0.1)
        outcome = rehearse(played, stage, seed=seed)
        assert outcome.stale == 0
        assert max(outcome.staleness.values()) <= bound


def test_a_resumed_run_knows_the_last_group_that_any_batch_had(monkeypatch):
    """Otherwise a group that earlier batches skipped would be a new one, and the next batch another."""
    reached, resumed = {0: -1}, []
    committed, resume = RunState.committed, RunState.resume

    def note(state, version):
        committed(state, version)
        reached[version] = state.reached

    def compare(state, version, last, quarantined):
        resumed.append((last, reached[version]))
        resume(state, version, last, quarantined)

    monkeypatch.setattr(RunState, "committed", note)
    monkeypatch.setattr(RunState, "resume", compare)
    crashes = tuple(float(at) for at in range(10, 120, 9))
    one = scenario(steps=150, faults=Faults(controller_crashes=crashes))
    batch = BatchShape(prompts=1, group_size=MEMBERS)  # so a batch may catch up groups alone
    measure(replace(one, config=one.config.model_copy(update={"batch": batch, "steps": 150})))
    assert len(resumed) > 3 and all(found == known for found, known in resumed)
