"""A standby of the trainer (`trainer.standby`) in virtual time."""

from __future__ import annotations

import pytest

from millrace.config.tables.operation import Supervision
from millrace.config.tables.schedules import Laminar
from millrace.config.tables.training import TrainerSection
from millrace.controller.trainer_session import TrainerTurn
from millrace.core.errors import TrainingError
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Crash, Faults, Starts, Strike

START_S = 20.0
SLOW_STARTS = (Starts("trainer*", (START_S, START_S)),)


def run(*, standby: bool = True, steps: int = 8, restarts: int = 100, **faults) -> Outcome:
    config = small_config(Laminar(), steps=steps).model_copy(
        update={
            "trainer": TrainerSection(standby=standby),
            "supervision": Supervision(restarts=restarts, spawn_timeout_s=60.0),
        }
    )
    scenario = Scenario(config, faults=Faults(**faults))
    return simulate(scenario, Invariants(scenario))


def absence_s(outcome: Outcome) -> float:
    """From the first death of a trainer to the next step."""
    died_s = next(e.time_s for e in outcome.events if e.kind == "worker_died")
    return next(e.time_s for e in outcome.events if e.kind == "step" and e.time_s > died_s) - died_s


def dead(outcome: Outcome) -> list[str]:
    return [fields["name"] for fields in outcome.of("worker_died")]


def test_a_standby_goes_on_without_a_start_and_the_dead_one_is_the_standby_then() -> None:
    faults = {"starts": SLOW_STARTS, "strikes": (Strike("trainer", 7), Strike("trainer", 14))}
    with_one, without = (run(standby=standby, steps=20, **faults) for standby in (True, False))
    assert dead(with_one) == ["trainer", "trainer-2"]
    assert [fields["name"] for fields in with_one.of("took_over")] == ["trainer-2", "trainer"]
    assert absence_s(with_one) < START_S <= absence_s(without)
    assert not without.of("took_over")


def test_a_standby_that_dies_again_and_again_is_replaced_and_the_trainer_goes_on() -> None:
    outcome = run(crashes=tuple(Crash("trainer-2", 0.5 * i) for i in range(1, 40)))
    assert outcome.restarts == len(dead(outcome)) >= 3
    assert set(dead(outcome)) == {"trainer-2"} and not outcome.of("took_over")
    assert not any(fields["replayed"] for fields in outcome.of("step"))


def test_trainer_and_standby_that_die_at_once_start_as_any_trainer_does() -> None:
    outcome = run(strikes=(Strike("trainer*", 3),))
    assert sorted(dead(outcome)) == ["trainer", "trainer-2"]
    assert outcome.accounting.trained == outcome.accounting.admitted


def test_a_standby_that_cannot_start_is_given_up_and_the_run_goes_on() -> None:
    outcome = run(restarts=0, steps=200, starts=(Starts("trainer-2", (1e4, 1e4)),))
    (warning,) = outcome.of("warned")
    assert warning["source"] == "trainer.standby" and "goes on without a standby" in warning["reason"]
    assert outcome.of("step")[-1]["version"] == 200


def test_an_error_that_ends_the_run_is_not_tried_again_on_the_standby() -> None:
    with pytest.raises(TrainingError, match="3 batches in a row"):
        run(poisonous=1.0)


def test_a_trainer_gives_back_its_own_turn_only() -> None:
    turn = TrainerTurn()
    assert turn.take("trainer") and not turn.take("trainer-2") and turn.take("trainer")
    turn.give_back("trainer-2")
    assert not turn.take("trainer-2")
    turn.give_back("trainer")
    assert turn.take("trainer-2") and not turn.take("trainer")
