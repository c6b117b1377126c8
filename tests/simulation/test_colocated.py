"""One device in turns, under the real controller: nobody holds the device beside the other side."""

from __future__ import annotations

import pytest

from millrace.config.schema import Config
from millrace.config.tables.generation import Rollout
from millrace.config.tables.schedules import AReaL, LlamaRL, Schedule, Synchronous
from millrace.ledger.sqlite import SqliteLedger
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.verdicts import explore
from millrace_sim.explore.worlds import small_config
from millrace_sim.roles.world import World
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Crash, Faults
from tests.long import covering, few

SCHEDULES: dict[str, Schedule] = {
    "synchronous": Synchronous(),
    "areal 0": AReaL(eta=0),
    "areal 1": AReaL(eta=1),
    "llamarl 1": LlamaRL(lag=1),
}
SEEDS, CHUNK = 60, 5


def colocated(schedule: Schedule, **changes: object) -> Config:
    rollout = Rollout(replicas=2, slots=4, max_sequence_tokens=256, report_interval_s=0.15, colocated=True)
    return small_config(schedule, rollout=rollout, **changes)  # type: ignore[arg-type]


def play(scenario: Scenario) -> Outcome:
    """The run, watched by every invariant: one of them counts overlaps in the use of the device."""
    return simulate(scenario, Invariants(scenario))


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_side_sleeps_while_the_other_has_the_device(name: str) -> None:
    outcome = play(Scenario(colocated(SCHEDULES[name])))
    assert len(outcome.of("step")) == 8
    turns = [(one.kind, one.fields["name"]) for one in outcome.events if one.kind in ("slept", "woke")]
    awake: set[str] = set()
    for kind, who in turns:
        (awake.add if kind == "woke" else awake.discard)(who)
        assert awake == {"trainer"} or "trainer" not in awake
    assert {who for _, who in turns} == {"trainer", "replica-0", "replica-1"}


class Final(Invariants):
    """Keeps the weights with which the run ends: a history of all that was trained."""

    digest = ""

    def on_end(self, ledger: SqliteLedger, world: World) -> None:
        super().on_end(ledger, world)
        (self.digest,) = (history.digest for history in world.exports.values())


def test_at_staleness_0_a_run_in_turns_trains_what_the_synchronous_run_trains() -> None:
    config = colocated(Synchronous())
    apart = config.model_copy(update={"rollout": config.rollout.model_copy(update={"colocated": False})})
    digests = set()
    for each in (config, apart):
        final = Final(Scenario(each))
        simulate(Scenario(each), final)
        digests.add(final.digest)
    assert len(digests) == 1


def test_at_staleness_1_unfinished_trajectories_go_on_with_the_next_version() -> None:
    outcome = play(Scenario(colocated(AReaL(eta=1), steps=12)))
    spans = [(event["versions_min"], event["versions_max"]) for event in outcome.of("finished")]
    assert any(first < last for first, last in spans)
    assert max(event["staleness_max"] for event in outcome.of("step")) == 1


@pytest.mark.parametrize(
    ("name", "worker", "point"),
    covering(["synchronous", "areal 1"], ["trainer", "replica-0", "replica-*", "relay"], range(8)),
)
def test_a_worker_that_dies_at_a_hand_over_stops_nobody(name: str, worker: str, point: int) -> None:
    """Sleeping and waking take long here, so most of these moments are within a hand-over."""
    config, costs = colocated(SCHEDULES[name]), Costs(sleep_s=0.3, wake_s=0.3)
    undisturbed = play(Scenario(config, costs=costs))
    moments = [event.time_s for event in undisturbed.events if event.kind in ("slept", "woke")]
    at_s = moments[(3 * point + 2) % len(moments)]
    for early_s in (0.0, 0.02, 0.15):
        faults = Faults(crashes=(Crash(worker, max(0.0, at_s - early_s)),))
        assert len(play(Scenario(config, costs=costs, faults=faults)).of("step")) >= 8


@pytest.mark.parametrize("first", few(range(0, SEEDS, CHUNK)))
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_storm_breaks_a_promise_of_a_run_in_turns(name: str, first: int) -> None:
    report = explore(first, CHUNK, config=colocated(SCHEDULES[name]))
    assert report.ok, "\n".join(f"{v.command}: {v.problem}" for v in report.failures)


def test_a_run_that_is_stopped_in_the_turn_of_the_replicas_saves_the_trainer() -> None:
    from millrace_sim import simulation

    class Stopper(Invariants):
        def on_end(self, ledger: object, world: object) -> None:
            """The run does not make all its steps."""

    scenario = Scenario(colocated(Synchronous(), steps=50), time_max_s=400.0)
    stopped = []

    class Stopping(simulation.Controller):
        async def run(self) -> None:
            import asyncio

            async with asyncio.TaskGroup() as group:
                task = group.create_task(super().run())
                await asyncio.sleep(6.1)
                stopped.append(self._run.state.version)
                self.stop()
                await task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "Controller", Stopping)
        outcome = simulate(scenario, Stopper(scenario))
    saved = [event["version"] for event in outcome.of("checkpoint")]
    assert saved[-1] == len(outcome.of("step")) >= stopped[0] > 0
