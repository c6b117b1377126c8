"""What only the log-prob gap can show."""

from __future__ import annotations

import pytest
from failure_rows import seen
from tests.tools.doctor_worlds import World, make_model, recorded

from millrace.cli.app import run
from millrace.diagnose.rules import diagnose


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("doctor") / "model")


def test_keys_and_values_kept_across_a_swap_show_in_the_gap(model, tmp_path):
    kept = recorded(World(model, keeps_cache=True, lr=3e-3), tmp_path / "kept.jsonl")
    forgotten = recorded(World(model, lr=3e-3), tmp_path / "forgotten.jsonl")
    seen("cache-kept", "millrace doctor " + " ".join(finding.fault for finding in diagnose(kept)))
    assert all(step.metrics["gap_one_version"] < 1e-5 for step in kept.steps)
    assert max(step.metrics.get("gap_after_swap", 0.0) for step in kept.steps) > 1e-2
    assert max(step.metrics.get("gap_after_swap", 0.0) for step in forgotten.steps) < 1e-5


def test_with_a_learning_rate_of_0_the_gap_has_no_trend(model, tmp_path):
    evidence = recorded(World(model, lr=0.0, lag=3, steps=12), tmp_path / "events.jsonl")
    gaps = [mean for step in evidence.steps for mean, _, _ in step.gap.values()]
    assert {staleness for step in evidence.steps for staleness in step.gap} == {0, 1, 2, 3}
    seen("learning-rate-0", "flat" if max(gaps) < 1e-5 else f"a trend: {gaps}")


def test_a_directory_that_is_no_run_is_told(tmp_path, capsys):
    assert run(["doctor", str(tmp_path)]) == 1
    assert "is no run directory" in capsys.readouterr().err
