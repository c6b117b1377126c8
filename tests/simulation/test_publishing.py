"""A version is digested while the next step is computed, and nobody can read it before."""

from __future__ import annotations

from millrace.config.tables.schedules import AReaL, Millrace, Schedule, Synchronous
from millrace.controller.state.run_state import RunState
from millrace.core import clock
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Crash, Faults

STEPS = 6


def run(costs: Costs, *crashes: Crash, schedule: Schedule = AReaL(eta=2)) -> Outcome:
    config = small_config(schedule, steps=STEPS)
    scenario = Scenario(config, costs=costs, faults=Faults(crashes=crashes), time_max_s=400.0)
    return simulate(scenario, Invariants(scenario))


def times(outcome: Outcome, kind: str) -> dict[int, float]:
    """By version, the first."""
    moments = [(e.fields["version"], e.time_s) for e in outcome.events if e.kind == kind]
    return dict(reversed(moments))


def test_a_trainer_waits_for_the_copy_alone() -> None:
    waiting = run(Costs(step_base_s=5.0, publish_s=4.0, digest_s=0.0))
    beside = run(Costs(step_base_s=5.0, publish_s=1.0, digest_s=3.0))
    assert times(beside, "step")[STEPS] < times(waiting, "step")[STEPS] - 3.0 * (STEPS - 2)
    assert {(info["stall_s"], info["digest_s"]) for info in beside.of("published")} == {(1.0, 3.0)}


def test_an_update_waits_until_the_version_before_it_is_digested() -> None:
    outcome = run(Costs(digest_s=4.0))
    steps, published = times(outcome, "step"), times(outcome, "published")
    assert sorted(published) == list(range(STEPS + 1))
    assert all(steps[version] >= published[version - 1] for version in steps)
    assert all(published[version] > steps[version] + 4.0 for version in steps)
    assert outcome.restarts == 0


def test_the_last_version_is_whole_before_the_model_is_exported() -> None:
    outcome = run(Costs(digest_s=4.0), schedule=Synchronous())
    assert times(outcome, "published")[STEPS] < outcome.events[-1].time_s
    assert times(outcome, "published")[STEPS] > times(outcome, "step")[STEPS] + 4.0


def test_a_trainer_that_dies_between_the_copy_and_its_digest_leaves_nothing_to_read() -> None:
    calm = run(Costs(digest_s=4.0))
    third = times(calm, "published")[3]
    outcome = run(Costs(digest_s=4.0), Crash("trainer", third - 1.0))
    recovered = next(e.time_s for e in outcome.events if e.kind == "worker_recovered")
    assert min(times(outcome, kind)[3] for kind in ("published", "staged", "pulled")) > recovered
    assert outcome.accounting.trained == outcome.accounting.admitted
    assert outcome.of("published")[-1]["digest"] == calm.of("published")[-1]["digest"]


def test_a_relay_that_dies_between_the_copy_and_its_digest_gets_the_version_again() -> None:
    calm = run(Costs(digest_s=4.0))
    third = times(calm, "published")[3]
    outcome = run(Costs(digest_s=4.0), Crash("relay", third - 1.0))
    assert [info["version"] for info in outcome.of("published")].count(3) <= 1
    assert outcome.of("staged")[-1]["version"] == STEPS
    assert outcome.accounting.trained == outcome.accounting.admitted


def test_no_group_starts_under_old_weights_while_newer_ones_are_digested() -> None:
    """Where the trainer has taken its next batch, there is room for groups: they wait for the new weights."""
    outcome = run(Costs(step_base_s=5.0, digest_s=3.0), schedule=Millrace(staleness_max=4))
    pulled, published = times(outcome, "pulled"), times(outcome, "published")
    admitted = [e.time_s for e in outcome.events if e.kind == "admitted"]
    for version in range(1, STEPS):
        assert not any(published[version] - 3.0 < at < pulled[version] for at in admitted)
    assert any(at > published[1] for at in admitted)


def test_a_trainer_that_dies_in_a_digest_leaves_no_replica_waiting_for_its_version() -> None:
    class Watch(Invariants):
        def on_decision(self, state: RunState) -> None:
            super().on_decision(state)
            due.append((clock.now(), next(iter(state.relays.values())).staging_version))

    costs, due = Costs(step_base_s=5.0, digest_s=4.0, load_s=15.0), list[tuple[float, int]]()
    died = times(run(costs), "published")[1] - 1.0
    faults = Faults(crashes=(Crash("trainer", died),))
    scenario = Scenario(small_config(AReaL(eta=2), steps=STEPS), costs=costs, faults=faults, time_max_s=400.0)
    simulate(scenario, Watch(scenario))
    before, meanwhile, after = (
        {version for at, version in due if first < at < last}
        for first, last in ((0.0, died), (died + 1.0, died + 15.0), (died + 15.0, 400.0))
    )
    assert 1 in before and meanwhile == {-1} and 1 in after
