"""A real run whose replicas have a Python of their own, and whose relay holds two versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.long import long

from millrace.cli.app import run
from millrace.observe.sinks.jsonl import read_events

OFF_POLICY = "schedule={kind='laminar', staleness_max=4}"


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment without pip, which finds our packages through a .pth file."""
    directory = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return str(directory / "bin" / "python")


@long
def test_replicas_of_another_python_and_two_versions_train(
    other_python: str, start: Path, warm: None, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    sets = (f"rollout.python={other_python}", "rollout.replicas=1", "weights.slots=2", OFF_POLICY)
    arguments = [word for override in sets for word in ("--set", override)]
    assert run(["train", str(start), "--run-dir", str(directory), *arguments]) == 0
    events = list(read_events(directory / "events.jsonl"))
    assert sum(event.kind == "step" for event in events) == 4
    assert not [event for event in events if event.kind == "worker_died"]
