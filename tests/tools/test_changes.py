"""What a change would give is predicted from the events of a run alone, and the change then gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.long import long
from tests.tools.test_calibrate import TRUE, calibration, config

from millrace.config.tables.schedules import Synchronous
from millrace_sim import Workload
from millrace_sim.calibrate.changes import EVENTS_ASKED, Outlook, outlook
from millrace_sim.calibrate.learn import Calibration
from millrace_sim.costs.workload import LogNormal
from millrace_sim.measure import Measure, measure
from millrace_sim.simulation import Scale, Scenario


def ratios(answer: Outlook) -> dict[str, float | None]:
    """By the first words of each change."""
    return {gain.change.partition(" (")[0]: gain.ratio for gain in answer.gains}


def true_speed(replicas: int) -> float:
    rollout = config().rollout.model_copy(update={"replicas": replicas})
    changed = config().model_copy(update={"rollout": rollout, "steps": 24})
    workload = Workload(prompt_tokens=(8, 24), completion=LogNormal(30, 0.6))
    return 1 / measure(Scenario(changed, costs=TRUE, workload=workload, scale=Scale(slice_s=0.02)))[0].step_s


def changed(**tables: object) -> Calibration:
    before = calibration()
    return replace(before, config=before.config.model_copy(update=tables))


def test_the_gain_of_a_replica_is_the_one_that_a_replica_gives():
    answer = outlook(calibration())
    assert answer.error == pytest.approx(0.0, abs=0.1)
    assert any("shares its cores: replicas are 1.5 times slower" in note for note in answer.notes)
    assert ratios(answer)["one more replica"] == pytest.approx(true_speed(3) / true_speed(2), rel=0.1)


@long
def test_slow_rewards_gain_by_a_worker_and_by_nothing_else():
    before = calibration()
    slow = replace(before, costs=replace(before.costs, score_s=0.2))
    gains = ratios(outlook(slow))
    assert gains.pop("one more reward worker") == pytest.approx(2.0, rel=0.2)
    assert all(gain == pytest.approx(1.0, abs=0.15) for gain in gains.values())


@long
def test_a_synchronous_run_is_offered_a_schedule_with_a_bound():
    answer = outlook(changed(schedule=Synchronous()))
    names = [gain.change for gain in answer.gains]
    assert any("synchronous -> millrace" in name for name in names)
    assert ratios(answer)["a larger staleness bound"] > 1.1


def test_a_device_that_is_lent_in_turns_is_left_out_in_words():
    rollout = config().rollout.model_copy(update={"colocated": True})
    answer = outlook(changed(rollout=rollout))
    assert answer.simulated_per_s is None and answer.gains == ()
    assert "in turns" in answer.notes[0]


def test_without_time_a_change_is_unknown_and_says_so():
    calls = iter(range(10_000))
    answer = outlook(calibration(), lambda: next(calls) > 80)
    assert answer.simulated_per_s is not None
    assert answer.gains[-1].ratio is None
    assert answer.gains[-1].why == "no time was left"
    assert answer.gains[0].change.startswith("one more replica")
    assert outlook(calibration(), lambda: True).notes == (
        "the run as it is could not be simulated: no time was left",
    )


def test_a_simulation_whose_step_takes_long_ends_in_the_middle_of_it(monkeypatch: pytest.MonkeyPatch):
    seen, counted = [], Measure.on_event
    monkeypatch.setattr(Measure, "on_event", lambda watch, event: (seen.append(event), counted(watch, event)))
    calls = iter(range(10_000))
    answer = outlook(calibration(), lambda: next(calls) > 0)
    assert answer.notes == ("the run as it is could not be simulated: no time was left",)
    assert 0 < len(seen) <= EVENTS_ASKED and "step" not in {event.kind for event in seen}


def test_what_helps_the_bottleneck_is_simulated_first():
    calls = iter(range(10_000))
    answer = outlook(calibration(), lambda: next(calls) > 80, first="rewards")
    assert answer.gains[0].change.startswith("one more reward worker")


def test_a_poor_simulation_says_that_its_gains_are_only_an_order():
    before = calibration()
    other = replace(before, achieved=replace(before.achieved, step_s=3 * before.achieved.step_s))
    calls = iter(range(10_000))
    answer = outlook(other, lambda: next(calls) > 80)
    assert any("read the gains as an order" in note for note in answer.notes)
