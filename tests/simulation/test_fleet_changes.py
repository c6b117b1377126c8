"""Replicas that come and go while a run trains: by command, by notice, and by their death."""

from __future__ import annotations

import random

import pytest

from millrace.config.tables.schedules import Laminar, Millrace, RLBoost, Synchronous
from millrace.controller import controller
from millrace.controller.fleet.live_replicas import to_leave
from millrace.controller.state.replicas import ReplicaRecord
from millrace.core.errors import DeadlineExceeded
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import SCHEDULES, small_config, spot
from millrace_sim.simulation import Scaling, Scenario, simulate
from millrace_sim.virtual.faults import Crash, Faults, Notice
from tests.long import few, long

PRESETS = (*SCHEDULES, RLBoost(), RLBoost(staleness_max=1), RLBoost(staleness_max=0))
SLOW = Costs(step_base_s=0.2)


def played(scenario):
    """What became of it. Every promise is kept, and nothing is lost."""
    outcome = simulate(scenario, Invariants(scenario))
    assert (outcome.accounting.trained, outcome.accounting.in_flight) == (outcome.accounting.admitted, 0)
    return outcome


def run(*scalings, schedule=Millrace(), steps=12, replicas=1, **world):
    config = small_config(schedule, steps=steps, replicas=replicas)
    asked = tuple(Scaling(at_s, num) for at_s, num in scalings)
    return played(Scenario(config, costs=SLOW, scalings=asked, **world))


def resumed(outcome):
    """Trajectory -> tokens that it already had, of leases that go on with some."""
    return {
        tuple(lease["trajectory_ids"]): lease["resumed_tokens"]
        for lease in outcome.of("leased")
        if lease["resumed_tokens"]
    }


@pytest.mark.parametrize("seed", few(range(30), 6))
def test_replicas_that_come_and_go_cost_nothing_but_time(seed):
    """Spot instances: everything that happens to them is drawn from the seed."""
    rng = random.Random(seed)
    config = small_config(PRESETS[seed % len(PRESETS)], steps=rng.randint(4, 12), seed=seed)
    played(spot(Scenario(config, seed=seed, costs=SLOW, later_hosts=seed % 3), rng))


def test_a_replica_that_joins_serves_once_it_has_proved_a_digest():
    outcome = run((2.0, 3))
    assert [event["replica"] for event in outcome.of("joined")] == ["replica-1", "replica-2"]
    for name in ("replica-1", "replica-2"):
        kinds = [e.kind for e in outcome.events if e.fields.get("replica") == name and e.kind != "report"]
        assert kinds[:2] == ["joined", "pulled"] and "leased" in kinds


def test_what_a_leaving_replica_works_on_goes_on_elsewhere_with_its_tokens():
    outcome = run((3.0, 1), replicas=3)
    moved = {tid for event in outcome.of("leaving") for tid in event["trajectories"]}
    assert len(outcome.of("left")) == 2 and moved
    assert moved <= {tid for ids in resumed(outcome) for tid in ids}
    assert sum(resumed(outcome).values()) > 0
    assert not outcome.of("restarted") and not outcome.restarts


def test_one_replica_that_stays_takes_over_trajectories_of_several_versions():
    outcome = run((3.5, 1), replicas=3)
    before = {event["version"] for event in outcome.of("leased") if event["resumed_tokens"]}
    assert len(before) > 1 and outcome.wall_s < 30


def test_names_are_never_given_twice():
    outcome = run((2.0, 3), (4.0, 1), (6.0, 3), steps=20)
    names = [event["replica"] for event in outcome.of("joined")]
    assert names == ["replica-1", "replica-2", "replica-3", "replica-4"]


def test_a_run_without_replicas_waits_says_so_and_goes_on():
    outcome = run((3.0, 0), (500.0, 2))
    waits = [line for event in outcome.of("stalled") for line in event["waits"]]
    assert any("the run has no replica" in line for line in waits)
    assert 500 < outcome.wall_s < 600


def test_a_run_that_nobody_gives_a_replica_for_a_day_ends(monkeypatch):
    assert controller.EMPTY_S_MAX == 24 * 3600
    monkeypatch.setattr(controller, "EMPTY_S_MAX", 900.0)
    config = small_config(Millrace(), replicas=1)
    scenario = Scenario(config, scalings=(Scaling(3.0, 0),))
    with pytest.raises(DeadlineExceeded, match=r"(?s)no progress for 900 s.*the run has no replica"):
        simulate(scenario)


def test_a_notice_empties_a_replica_and_another_takes_its_place():
    outcome = run(replicas=2, faults=Faults(notices=(Notice("replica-0", 3.0),)))
    (leaving,) = outcome.of("leaving")
    assert leaving["replica"] == "replica-0" and "told to end" in leaving["reason"]
    assert [event["replica"] for event in outcome.of("joined")] == ["replica-2"]
    assert not outcome.of("worker_died")
    assert set(leaving["trajectories"]) <= {tid for ids in resumed(outcome) for tid in ids}


def test_a_replica_that_dies_before_it_is_emptied_is_not_started_again():
    faults = Faults(notices=(Notice("replica-0", 3.0, grace_s=0.0),))
    outcome = run(replicas=2, faults=faults)
    started = [event["name"] for event in outcome.of("worker_started") if event["role"] == "replica"]
    assert started.count("replica-0") <= 2 and "replica-1" in started


def test_a_controller_that_dies_goes_on_with_the_number_asked_for_last():
    outcome = run((2.0, 4), faults=Faults(controller_crashes=(5.0,)))
    assert [len(event["replicas"]) for event in outcome.of("run_started")] == [1, 4]


def test_the_first_event_says_what_of_the_algorithm_changes_nothing():
    config = small_config(Millrace(), replicas=1, algorithm={"kind": "grpo", "clip": "ppo"})
    (started,) = played(Scenario(config, costs=SLOW)).of("run_started")
    assert [line.split(" changes")[0] for line in started["inert"]] == ['`algorithm.clip` ("ppo")']


def test_a_replica_that_is_not_up_leaves_at_once():
    crashes = tuple(Crash("replica-1", 0.5 + 0.01 * i) for i in range(1000))
    outcome = run((4.0, 1), replicas=2, faults=Faults(crashes=crashes))
    assert [event["replica"] for event in outcome.of("left")] == ["replica-1"]


@long
def test_throughput_follows_the_capacity():
    """Generation is the slower side, so steps come as replicas do."""

    def step_s(*scalings, replicas):
        config = small_config(Millrace(), steps=60, replicas=replicas)
        asked = tuple(Scaling(at_s, num) for at_s, num in scalings)
        times = [
            e.time_s for e in played(Scenario(config, costs=SLOW, scalings=asked)).events if e.kind == "step"
        ]
        return (times[-1] - times[len(times) // 2]) / (len(times) - len(times) // 2 - 1)

    one, four, grown = step_s(replicas=1), step_s(replicas=4), step_s((5.0, 4), replicas=1)
    assert four < one / 2
    assert abs(grown - four) < 0.2 * four


def test_a_round_of_laminar_is_a_share_of_the_replicas_that_are_there():
    """With one replica a round is a batch, with two half of it."""
    outcome = run((6.0, 2), schedule=Laminar(), steps=12)
    assert len(outcome.of("pulled")) > len(run(schedule=Laminar(), steps=12).of("pulled"))


def test_on_policy_a_changing_fleet_trains_the_same_batches():
    calm, changed = run(schedule=Synchronous()), run((1.0, 3), (4.0, 1), (7.0, 2), schedule=Synchronous())
    assert [s["staleness_max"] for s in changed.of("step")] == [0] * 12
    assert calm.accounting == changed.accounting


def test_those_with_the_least_to_move_leave_first_and_of_equals_the_last():
    records = [ReplicaRecord(f"r{i}", 4, 100, alive=True, version=3) for i in range(4)]
    records[2].leased = {1: None, 2: None}
    records[1].version = -1
    assert to_leave(records, 3) == ["r1", "r3", "r0"]
    assert to_leave(records, -1) == []


def test_rlboost_leases_new_groups_only_where_the_newest_weights_are():
    """And its staleness stays below its bound, as replicas come and go."""
    outcome = run((3.0, 3), (6.0, 1), (9.0, 4), schedule=RLBoost(staleness_max=2), replicas=2)
    newest, admitted = -1, 0
    for event in outcome.events:
        if event.kind == "staged":
            newest = event.fields["version"]
        elif event.kind == "leased" and not event.fields["resumed_tokens"]:
            admitted += 1
            assert event.fields["version"] >= newest - 1  # at most the one that was staged in this moment
    assert admitted and max(step["staleness_max"] for step in outcome.of("step")) <= 2
