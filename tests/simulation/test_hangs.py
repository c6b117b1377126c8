"""A worker that answers heartbeats but is stuck in a call is given up, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from millrace.config.tables.operation import Checkpoints, Supervision
from millrace.config.tables.schedules import Synchronous
from millrace.controller.patience import FLOOR_S
from millrace.core.errors import DeadlineExceeded
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.verdicts import try_seed
from millrace_sim.explore.worlds import small_config
from millrace_sim.roles.sim_replica import SimReplica
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.faults import Failures, Fate, Faults, Slow, Stuck

STUCK = 1e9
LIMIT_S = 600.0


@pytest.mark.parametrize("worker", ["trainer", "relay", "replica-0", "reward-worker-0"])
def test_a_stuck_worker_is_replaced_within_thirty_seconds(worker):
    supervision = Supervision(step_timeout_s=LIMIT_S, stall_s=1000.0)
    config = small_config(Synchronous(), steps=30, supervision=supervision)
    faults = Faults(slow=(Slow(worker, STUCK, start_s=4.0, end_s=5.0),))
    outcome = simulate(Scenario(config, faults=faults, time_max_s=200.0))
    deaths = [event for event in outcome.events if event.kind == "worker_died"]
    assert {event.fields["name"] for event in deaths} <= {worker}
    assert all(event.time_s < 5.0 + 30.0 for event in deaths)
    accounting = outcome.accounting  # a reward that hangs costs its trajectory, nothing else does
    assert accounting.trained == accounting.admitted - (worker == "reward-worker-0")


@pytest.mark.parametrize(("worker", "call"), [("trainer", "load"), ("relay", "stage"), ("replica-0", "pull")])
def test_a_worker_stuck_in_the_first_call_of_its_kind_is_replaced_within_thirty_seconds(worker, call):
    supervision = Supervision(step_timeout_s=LIMIT_S, stall_s=1000.0)
    config = small_config(Synchronous(), steps=3, supervision=supervision)
    calm = simulate(Scenario(config))
    made_s = next(e.time_s for e in calm.events if e.kind == "worker_started" and e.fields["name"] == worker)
    faults = Faults(stuck=(Stuck(worker, made_s + 1e-6),))
    outcome = simulate(Scenario(config, faults=faults, time_max_s=200.0))
    (death,) = [event for event in outcome.events if event.kind == "worker_died"]
    assert death.fields["name"] == worker and f"{call} was asked for" in death.fields["cause"]
    assert death.time_s < made_s + 30.0
    assert outcome.accounting.trained == outcome.accounting.admitted


def test_a_first_call_that_is_only_slow_is_waited_for():
    config = small_config(Synchronous(), steps=3, supervision=Supervision(step_timeout_s=LIMIT_S))
    outcome = simulate(Scenario(config, costs=Costs(load_s=3 * FLOOR_S), time_max_s=200.0))
    assert outcome.wall_s > 3 * FLOOR_S and outcome.restarts == 0


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.UNANSWERED])
def test_a_first_call_that_is_lost_is_noticed_although_its_worker_computes(fate, monkeypatch):
    lost = []

    def lose_the_first_load(faults, name, rng):
        calls = len(lost)
        lost.append(name)
        return fate if name == "trainer" and "trainer" not in lost[:calls] else Fate.FINE

    monkeypatch.setattr(Faults, "fate", lose_the_first_load)
    config = small_config(Synchronous(), steps=3, supervision=Supervision(step_timeout_s=LIMIT_S))
    outcome = simulate(Scenario(config, time_max_s=200.0))
    (death,) = outcome.of("worker_died")
    assert "load was asked for" in death["cause"] and "knows nothing of it" in death["cause"]
    assert outcome.wall_s < 30.0


@pytest.mark.parametrize("seed", [2163, 2477])
def test_a_call_whose_answer_heartbeats_overtake_is_not_taken_for_lost(seed):
    """Worlds that end only if workers are not given up for that."""
    assert not try_seed(seed).problem


def test_a_quiet_run_says_who_waits_for_whom_long_before_it_ends():
    config = small_config(Synchronous(), supervision=Supervision(step_timeout_s=LIMIT_S, stall_s=100.0))
    stuck = Scenario(config, faults=Faults(slow=(Slow("trainer", STUCK),)), time_max_s=1000.0)
    with pytest.raises(DeadlineExceeded, match="trainer waits for its"):
        simulate(stuck)


def test_a_report_stream_that_hangs_costs_its_replica_and_nothing_else(monkeypatch):
    honest, hung = SimReplica.reports, []

    async def hang_once(replica):
        num_reports = 0
        async for report in honest(replica):
            num_reports += bool(report.progress)
            if num_reports == 3 and not hung:
                hung.append(replica)
                await asyncio.sleep(STUCK)
            yield report

    monkeypatch.setattr(SimReplica, "reports", hang_once)
    supervision = Supervision(heartbeat_timeout_s=4.0, stall_s=100.0)
    outcome = simulate(Scenario(small_config(Synchronous(), supervision=supervision), time_max_s=500.0))
    (death,) = outcome.of("worker_died")
    assert "no report for 4 s" in death["cause"]
    assert outcome.accounting.trained == outcome.accounting.admitted


@pytest.mark.parametrize("costs", [Costs(step_base_s=25.0), Costs(load_s=25.0)], ids=repr)
def test_what_is_waited_for_within_its_own_deadline_is_no_stall(costs):
    supervision = Supervision(stall_s=5.0, step_timeout_s=LIMIT_S)
    config = small_config(Synchronous(), steps=2, supervision=supervision)
    outcome = simulate(Scenario(config, costs=costs, time_max_s=20_000.0))
    assert outcome.restarts == 0 and outcome.of("starting" if costs.load_s > 20 else "stalled")


def test_a_start_that_takes_long_is_no_stall():
    config = small_config(Synchronous(), steps=2, supervision=Supervision(step_timeout_s=LIMIT_S))
    outcome = simulate(Scenario(config, costs=Costs(load_s=90.0), time_max_s=1000.0))
    assert [round(notice["quiet_s"], -1) for notice in outcome.of("starting")] == [20, 40, 80]
    assert not outcome.of("stalled")


def test_a_start_that_never_succeeds_is_a_stall_although_each_has_its_deadline():
    supervision = Supervision(stall_s=50.0, spawn_timeout_s=40.0, restart_window_s=10.0)
    config = small_config(Synchronous(), supervision=supervision)
    with pytest.raises(DeadlineExceeded, match="no progress for 50 s"):
        simulate(Scenario(config, faults=Faults(slow=(Slow("trainer", STUCK),)), time_max_s=2000.0))


def test_notices_of_a_stall_begin_anew_after_progress():
    supervision = Supervision(stall_s=1000.0, step_timeout_s=LIMIT_S)
    config = small_config(Synchronous(), steps=2, supervision=supervision)
    outcome = simulate(Scenario(config, costs=Costs(step_base_s=90.0), time_max_s=1000.0))
    quiet_s = [round(notice["quiet_s"], -1) for notice in outcome.of("stalled")]
    assert quiet_s == [20, 40, 80] * 2


def test_a_trainer_that_lives_for_little_more_than_a_step_gets_to_the_end():
    config = small_config(Synchronous(), steps=8, checkpoints=Checkpoints(every=8))
    faults = Faults(failures=(Failures("trainer", 1.2),))
    outcome = simulate(Scenario(config, costs=Costs(step_base_s=1.0), faults=faults, time_max_s=400.0))
    assert len(outcome.of("worker_died")) > 4
    steps = {step["version"] for step in outcome.of("step")}
    assert steps == set(range(1, 9))
