"""Every step tells how fresh and how fair the last batches were."""

from __future__ import annotations

from statistics import fmean

import pytest

from millrace.config.tables.schedules import AReaL, Laminar, Synchronous
from millrace.core.fairness import BATCHES, BATCHES_MIN, LengthMoments, fairness, next_correlation
from millrace_sim.compare import compare
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Observer, Scenario, simulate
from millrace_sim.virtual.faults import Faults

STEPS = BATCHES + 8


class Seen(Observer):
    """Steps, and the lengths of completions by trajectory."""

    def __init__(self):
        self.steps, self.lengths = [], {}

    def on_event(self, event):
        if event.kind == "step":
            self.steps.append(event.fields)
        if event.kind == "finished":
            self.lengths[event.fields["trajectory_id"]] = event.fields["tokens"]


@pytest.mark.parametrize("schedule", [Synchronous(), AReaL(eta=2)], ids=repr)
def test_the_figures_of_a_step_are_those_of_the_batches_before_it(schedule):
    seen = Seen()
    simulate(Scenario(small_config(schedule, steps=STEPS)), seen)
    lengths = [LengthMoments(**step["lengths"]) for step in seen.steps]
    for index, step in enumerate(seen.steps):
        last = lengths[max(0, index + 1 - BATCHES) : index + 1]
        window = step["window"]
        assert window["batches"] == len(last)
        if len(last) < BATCHES_MIN:
            assert window["fairness"] is window["next"] is window["staleness_mean"] is None
        else:
            assert (window["fairness"], window["next"]) == (fairness(last), next_correlation(last))
    if schedule == Synchronous():
        assert seen.steps[-1]["window"]["staleness_mean"] == 0.0


def test_the_lengths_of_a_batch_are_the_means_of_its_groups():
    """All batches together hold every completion once."""
    seen = Seen()
    config = small_config(Synchronous(), steps=3)
    simulate(Scenario(config), seen)
    total = sum(step["lengths"]["groups"] * step["lengths"]["mean"] for step in seen.steps)
    assert {step["lengths"]["groups"] for step in seen.steps} == {config.batch.prompts}
    assert total * config.batch.group_size == pytest.approx(sum(seen.lengths.values()))


def test_a_resumed_run_begins_a_new_window():
    seen = Seen()
    config = small_config(Laminar(), steps=STEPS)
    outcome = simulate(Scenario(config, faults=Faults(controller_crashes=(6.0,))), seen)
    assert outcome.resumes == 1
    windows = [step["window"]["batches"] for step in seen.steps]
    again = [i for i in range(1, len(windows)) if windows[i] < windows[i - 1]]
    assert len(again) == 1 and windows[again[0]] == 1
    assert windows[-1] == min(BATCHES, len(windows) - again[0])


def test_comparisons_tell_fairness_with_its_interval():
    base = Scenario(small_config(AReaL(), steps=STEPS))
    (compared,) = compare(base, {"areal": AReaL()}, seeds=3, jobs=1)
    known = compared.known("fairness")
    assert known is not None and known.half_width > 0
    assert known.mean == pytest.approx(fmean(result.fairness for result in compared.results))
