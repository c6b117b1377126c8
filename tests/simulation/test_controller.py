"""The real controller, schedules and ledger in virtual time, in a calm world."""

from __future__ import annotations

import pytest

from millrace.config.tables.schedules import Laminar, Synchronous
from millrace.controller.context import RunContext
from millrace.controller.pace import Pace
from millrace.core.errors import LedgerError
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import SCHEDULES, small_config
from millrace_sim.simulation import Observer, Scale, Scenario, simulate
from millrace_sim.virtual.faults import ClockJump, Crash, Faults, Lag, Slow
from tests.long import few


@pytest.mark.parametrize("schedule", few(SCHEDULES, 4), ids=repr)
def test_a_calm_run_trains_everything_it_admits(schedule):
    scenario = Scenario(small_config(schedule, steps=12))
    outcome = simulate(scenario, Invariants(scenario))
    accounting = outcome.accounting
    assert (accounting.trained, accounting.in_flight) == (accounting.admitted, 0)
    assert outcome.restarts == 0


@pytest.mark.parametrize("schedule", few(SCHEDULES, 4), ids=repr)
def test_a_controller_that_dies_again_and_again_trains_the_same_prompts(schedule):
    faults = Faults(controller_crashes=tuple(1.5 * i for i in range(1, 6)))
    scenario = Scenario(small_config(schedule), faults=faults)
    outcome = simulate(scenario, Invariants(scenario))
    assert outcome.resumes == 5
    assert outcome.accounting.trained == outcome.accounting.admitted


def test_a_clock_that_jumps_hours_ahead_ends_nothing():
    faults = Faults(clock_jumps=(ClockJump(2.0, 10_000.0), ClockJump(10_003.0, 10_000.0)))
    scenario = Scenario(small_config(SCHEDULES[0]), faults=faults)
    simulate(scenario, Invariants(scenario))


def test_what_was_published_to_a_relay_that_died_is_not_asked_of_the_next_one():
    """The trainer's answer takes longer than the relay lives."""
    faults = Faults(
        lags=(Lag("trainer", extra_s=0.4),), crashes=tuple(Crash("relay", 0.9 * i) for i in range(1, 40))
    )
    scenario = Scenario(small_config(Laminar()), faults=faults)
    assert simulate(scenario, Invariants(scenario)).restarts >= 10


def test_a_version_that_is_published_again_while_it_is_staged_is_staged_then():
    """A trainer comes back and writes a slot while the relay has yet to look at what it wrote before."""
    faults = Faults(
        slow=(Slow("relay", factor=40.0),), crashes=tuple(Crash("trainer", 1.9 * i) for i in range(1, 30))
    )
    scenario = Scenario(small_config(Laminar()), faults=faults, costs=Costs(publish_s=0.5, load_s=0.05))
    outcome = simulate(scenario, Invariants(scenario))
    assert outcome.of("stage_missed")


def test_a_run_whose_last_write_to_the_ledger_fails_says_so_at_its_end(monkeypatch):
    class Ends(Observer):
        def on_event(self, event):
            if event.kind == "run_ended":
                reasons.append(event.fields["reason"])

    def refuse_the_last(run):
        if run.state.version == run.config.steps:
            raise LedgerError("the disk is full")
        flush(run)

    reasons, flush = [], RunContext.flush
    monkeypatch.setattr(RunContext, "flush", refuse_the_last)
    with pytest.raises(LedgerError):
        simulate(Scenario(small_config(Synchronous(), steps=1), scale=Scale(pace=Pace(flush_s=1e9))), Ends())
    assert reasons == ["LedgerError: the disk is full"]
