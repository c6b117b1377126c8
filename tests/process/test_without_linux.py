"""On a kernel that is not Linux, what needs no worker works, and what needs one says so before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runs import train

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def run_dir(start: Path, warm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run made on Linux, to look at elsewhere."""
    return train(start, tmp_path_factory.mktemp("runs") / "run", "steps=2").path


def millrace(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("without_linux.py")), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "show RUN",
        "doctor RUN",
        "report RUN --out report.html",
        "trace RUN --out trace.json",
        "export RUN --out model",
        f"simulate {ROOT}/examples/cluster.toml --set steps=3",
    ],
)
def test_what_needs_no_worker_works(command: str, run_dir: Path, tmp_path: Path) -> None:
    done = millrace(tmp_path, *command.replace("RUN", str(run_dir)).split())
    assert (done.returncode, done.stderr) == (0, "") or command.startswith(("doctor", "simulate")), done
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "train CONFIG",
        "train CONFIG --dry-run",
        "eval CONFIG",
        "try-reward CONFIG",
        "chaos CONFIG",
        "quickstart",
    ],
)
def test_what_needs_workers_says_so_and_leaves_nothing(command: str, start: Path, tmp_path: Path) -> None:
    done = millrace(tmp_path, *command.replace("CONFIG", str(start)).split())
    assert done.returncode == 1
    first, *rest = done.stderr.strip().splitlines()
    assert first.startswith("WorkerError: worker processes need Linux 5.3 or newer. This is ")
    assert all(name in first for name in ("pidfd_open", "memfd_create", "sched_getaffinity", "/proc"))
    assert "docs/installing.md" in rest[0]
    assert os.listdir(tmp_path) == []
