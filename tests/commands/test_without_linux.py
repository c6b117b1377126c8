"""On a kernel that is not Linux, what needs no worker works, and what needs one says so before it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.runs import train

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def run_dir(start: Path, warm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run made on Linux, to look at elsewhere."""
    return train(start, tmp_path_factory.mktemp("runs") / "run", "steps=2").path


WITHOUT_WORKERS = (
    "show RUN",
    "doctor RUN",
    "report RUN --out report.html",
    "trace RUN --out trace.json",
    "export RUN --out model",
    f"simulate {ROOT}/examples/cluster.toml --set steps=3",
)
WITH_WORKERS = (
    "train CONFIG",
    "train CONFIG --dry-run",
    "eval CONFIG",
    "try-task CONFIG",
    "curate CONFIG --out curated",
    "chaos CONFIG",
    "quickstart",
)


class CommandOutcome(NamedTuple):
    directory: Path
    code: int
    error: str


@pytest.fixture(scope="module")
def outcomes(
    start: Path, run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CommandOutcome]:
    """What became of each command, in a directory of its own, all in one process."""
    places = {command: tmp_path_factory.mktemp("place") for command in (*WITH_WORKERS, *WITHOUT_WORKERS)}
    lines = [
        json.dumps([str(place), command.replace("RUN", str(run_dir)).replace("CONFIG", str(start)).split()])
        for command, place in places.items()
    ]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("without_linux.py"))],
        input="\n".join(lines), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    answers = map(json.loads, done.stdout.splitlines())
    return {
        command: CommandOutcome(place, *answer)
        for (command, place), answer in zip(places.items(), answers, strict=True)
    }


@pytest.mark.parametrize("command", WITHOUT_WORKERS)
def test_what_needs_no_worker_works(command: str, outcomes: dict[str, CommandOutcome]) -> None:
    _, code, error = outcomes[command]
    assert (code, error) == (0, "") or command.startswith(("doctor", "simulate")), error
    assert code == 0 and "Traceback" not in error


@pytest.mark.parametrize("command", WITH_WORKERS)
def test_what_needs_workers_says_so_and_leaves_nothing(
    command: str, outcomes: dict[str, CommandOutcome]
) -> None:
    directory, code, error = outcomes[command]
    assert code == 1
    first, *rest = error.strip().splitlines()
    assert first.startswith("WorkerError: worker processes need Linux 5.3 or newer. This is ")
    assert all(name in first for name in ("pidfd_open", "memfd_create", "sched_getaffinity", "/proc"))
    assert "docs/installing.md" in rest[0]
    assert os.listdir(directory) == []
