"""Batches that cannot be trained on: what is at fault ends, the rest goes on, whatever else goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.config.tables.schedules import Synchronous
from millrace.controller.trainer_session import REJECTED_MAX
from millrace.core.errors import TrainingError
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import SCHEDULES, small_config
from millrace_sim.roles import sim_trainer
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.faults import Crash, Failures, Faults
from tests.long import covering, few


class NothingPoisonous(Invariants):
    """No weights were ever trained on what the trainer refused."""

    def on_end(self, ledger, world):
        super().on_end(ledger, world)
        trained = {i for step in world.exports["sim/final"].trained for i in step}
        assert not any(world.poisons(i) for i in trained)
        self.final = world.exports["sim/final"].digest


POISONOUS = Faults(poisonous=0.03)
CRASHES = replace(
    POISONOUS,
    failures=(Failures("trainer", 4.0), Failures("replica-*", 6.0)),
    controller_crashes=tuple(1.7 * i for i in range(1, 6)),
)


@pytest.mark.parametrize(("schedule", "faults"), covering(SCHEDULES, [POISONOUS, CRASHES]))
def test_a_run_goes_on_without_the_trajectories_that_cannot_be_trained_on(schedule, faults):
    scenario = Scenario(small_config(schedule, steps=12), faults=faults)
    outcome = simulate(scenario, NothingPoisonous(scenario))
    assert outcome.accounting.balanced
    assert 0 < outcome.accounting.rejected < outcome.accounting.trained
    assert outcome.accounting.in_flight == 0 or faults is CRASHES


@pytest.mark.parametrize("moments_s", few([[0.4, 1.3], [0.9, 2.1, 3.3]]))
def test_a_batch_is_rejected_alike_after_a_crash(moments_s):
    """Under `synchronous` the weights at the end are the same, whenever trainer and controller died."""
    finals = set()
    for died_s in (None, *moments_s):
        crashes = () if died_s is None else (Crash("trainer", died_s), Crash("trainer", 2 * died_s))
        controller = () if died_s is None else (1.5 * died_s, 3 * died_s)
        faults = replace(POISONOUS, crashes=crashes, controller_crashes=controller)
        scenario = Scenario(small_config(Synchronous(), steps=8), faults=faults)
        watch = NothingPoisonous(scenario)
        assert simulate(scenario, watch).of("step_rejected") or died_s is not None
        finals.add(watch.final)
    assert len(finals) == 1


def test_a_run_ends_when_batch_after_batch_is_rejected():
    scenario = Scenario(small_config(Synchronous(), steps=8), faults=Faults(poisonous=1.0))
    with pytest.raises(TrainingError, match=rf"{REJECTED_MAX} batches in a row.*version 0"):
        simulate(scenario, Invariants(scenario))


def test_a_ledger_with_trajectories_that_nobody_can_have_sampled_is_gone_through(monkeypatch):
    """However many batches in a row: the weights are not at fault."""
    honest = sim_trainer.StepRejected

    def unfit(*given, **fields):
        return honest(*given, **fields, unfit=True)

    monkeypatch.setattr(sim_trainer, "StepRejected", unfit)
    config = small_config(Synchronous(), steps=6)
    outcome = simulate(Scenario(config, faults=Faults(poisonous=0.4)))
    assert max(event["in_a_row"] for event in outcome.of("step_rejected")) == 0
    assert len(outcome.of("step")) == 6
    assert {event["reason"] for event in outcome.of("ended") if event["state"] == "rejected"} >= {
        "step 0: the loss is nan"
    }
