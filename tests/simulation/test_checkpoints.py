"""A checkpoint is written while steps go on, and counts when it is complete."""

from __future__ import annotations

from millrace.config.tables.operation import Checkpoints
from millrace.config.tables.schedules import Synchronous
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Crash, Faults

SLOW = Costs(save_s=20.0)  # many steps are made meanwhile


def run(costs: Costs, *crashes: Crash) -> Outcome:
    config = small_config(Synchronous(), steps=12, checkpoints=Checkpoints(every=3))
    return simulate(Scenario(config, costs=costs, faults=Faults(crashes=crashes), time_max_s=400.0))


def test_steps_go_on_while_a_checkpoint_is_written_and_only_one_is_written_at_a_time() -> None:
    outcome = run(SLOW)
    log = [(e.kind, e.fields["version"]) for e in outcome.events if e.kind in ("step", "checkpoint")]
    assert log.index(("checkpoint", 3)) > log.index(("step", 6))
    assert [version for kind, version in log if kind == "checkpoint"] == [3, 6, 9, 12]
    first, second, *_ = (info["stall_s"] for info in outcome.of("checkpoint"))
    assert first < 1.0 < second  # which waits for the first
    assert log[-1] == ("checkpoint", 12)  # the end waits for it


def test_a_trainer_that_dies_while_a_checkpoint_is_written_goes_on_from_the_one_before() -> None:
    calm = run(SLOW)
    second = [event.time_s for event in calm.events if event.kind == "checkpoint"][1]
    outcome = run(SLOW, Crash("trainer", second - 5.0))
    replayed = [step["version"] for step in outcome.of("step") if step["replayed"]]
    assert replayed and replayed[0] == 4  # of version 6 nothing was complete
    assert outcome.accounting.trained == outcome.accounting.admitted
    assert {step["version"] for step in outcome.of("step")} == set(range(1, 13))
