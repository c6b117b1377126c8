"""Runs under attack, in real processes: a short version of `millrace chaos`."""

from __future__ import annotations

import pytest
from tests.runs import make_start

from millrace.cli.attack import SUPERVISION
from millrace.cli.chaos import attack, kill_and_resume


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_start(tmp_path_factory.mktemp("start"))


def failed(checks):
    return [check for check in checks if not check.holds]


@pytest.mark.parametrize(("schedule", "seed"), [("synchronous", 1), ("laminar", 2)])
def test_a_run_under_attack_loses_nothing_and_leaves_nothing(schedule, seed, start, tmp_path):
    overrides = [f"schedule.kind={schedule}", "steps=12", *SUPERVISION]
    assert not failed(attack(start, tmp_path / "run", overrides, 6, seed))


def test_a_run_killed_at_any_point_resumes_to_the_same_weights(start, tmp_path):
    assert not failed(kill_and_resume(start, tmp_path, [], 2, 3))
