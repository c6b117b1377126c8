"""Whole runs in real processes, in which trainer and replicas use one device in turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs import events, train, weights

from millrace.run_directory.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("warm")


def test_a_synchronous_run_in_turns_ends_with_the_weights_of_a_run_apart(
    start: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    run = train(start, tmp_path / "run", "rollout.colocated=true")
    assert weights(run) == weights(undisturbed)
    turns = [event.fields["name"] for event in (*events(run, "slept"), *events(run, "woke"))]
    replicas = [name for name in turns if name.startswith("replica-")]  # one alone may do a step's work
    assert turns.count("trainer") >= 2 * 4 and len(replicas) >= 2 * 4
    assert not [path for path in run.path.iterdir() if path.name.startswith("tmp")]


def test_unfinished_trajectories_go_on_after_the_turn_of_the_trainer(start: Path, tmp_path: Path) -> None:
    settings = ["schedule.kind=areal", "schedule.eta=1", "rollout.colocated=true", "steps=8"]
    run = train(start, tmp_path / "run", *settings)
    steps = events(run, "step")
    assert len(steps) == 8 and max(step.fields["staleness_max"] for step in steps) <= 1
