"""The benchmark's figures are what they are said to be, and kept runs are made once."""

from __future__ import annotations

import json

import pytest
import stored_runs
from stored_runs import Kept, Spec, Store

import learning


def run(reward, *, tokens_per_s=100.0, staleness=1.0, lengths=(10.0, 12.0), ours=None, load=0.5):
    """20 steps of 100 tokens at an even speed; the mean lengths of batches go round `lengths`."""
    steps = [
        {
            "t_s": i * 100 / tokens_per_s,
            "tokens": 100,
            "reward": reward + 0.02 * i,
            "wait_s": 0.25,
            "step_s": 0.5,
        }
        | {"staleness_mean": staleness, "lengths": [8, lengths[i % len(lengths)], 2.0]}
        for i in range(20)
    ]
    return Kept(steps, ours or {}, "abc", load)


def test_a_run_tells_speed_staleness_waiting_and_fairness():
    one = run(0.5, tokens_per_s=100.0)
    assert one.tokens_per_s == pytest.approx(100.0) and one.staleness_mean == 1.0
    assert one.trainer_waits == pytest.approx(0.25)
    assert one.fairness == pytest.approx(160 / 19 / ((160 + 640) / 159))
    assert one.next == pytest.approx(-1.0)
    assert run(0.5, lengths=(10.0,)).next == 0.0


def test_a_kept_run_is_made_once_and_again_with_other_settings(tmp_path):
    made = []

    def make(spec):
        made.append(spec)
        return run(0.5).steps

    specs = [Spec("short", "millrace", seed, 20, "default", {"slots": 16}) for seed in range(3)]
    Store(tmp_path, make).complete(specs[:1])
    Store(tmp_path, make).complete(specs)
    assert made == specs
    assert {spec: kept.ours for spec, kept in Store(tmp_path).all(specs).items()} == {
        spec: {"slots": 16} for spec in specs
    }
    other = Spec("short", "millrace", 0, 20, "default", {"slots": 8})
    assert Store(tmp_path).get(other) is None
    assert json.loads((tmp_path / other.file).read_text())["ours"] == {"slots": 16}


def test_learning_is_compared_within_a_seed():
    runs = {}
    for seed in range(3):
        runs["staleness 0", seed] = run(0.5 + seed / 10)
        runs["staleness 4", seed] = run(0.48 + seed / 10 + seed / 1000)
    (cells,) = learning.differences(runs).values()
    assert cells[-1][0] == pytest.approx(-0.019) and cells[-1][1] == pytest.approx(4.303 * 0.001 / 3**0.5)
    assert learning.parts([0.0, 1.0] * 5) == [0.5] * 6


def test_an_interval_is_student_s():
    assert stored_runs.interval([1.0]) == (1.0, None)
    mean, half = stored_runs.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == (3.0, pytest.approx(2.776 * (2.5 / 5) ** 0.5))
