"""Every benchmark still runs: with `--quick`, from its command to its figures. Its speed says nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())
SMOKE = {"overhead", "weights"}
TIMEOUT_S = 280.0
SKIPPED = "skipped: "
CASES = [
    pytest.param(path, marks=[pytest.mark.smoke] * (path.stem in SMOKE), id=path.stem) for path in BENCHMARKS
]


@pytest.mark.parametrize("path", CASES)
def test_a_benchmark_runs_and_tells_its_figures(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, path, "--quick", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-8000:]
    if done.stderr.startswith(SKIPPED):
        pytest.skip(done.stderr.removeprefix(SKIPPED).strip())
    assert json.loads(done.stdout.splitlines()[-1])
