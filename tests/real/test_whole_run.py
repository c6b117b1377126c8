"""`make real` with few steps: it trains the real model, tells what is true, and goes on where it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
SHORT = """
steps=2 batch.prompts=2 batch.group_size=4 sampling.max_tokens=12 rollout.max_sequence_tokens=96
checkpoints.every=1 optimizer.lr=1e-12
evaluations=[{name="held-out",prompts=2,samples=0,task.kind="function",task.path="TASKS",task.chat=true}]
"""
"""At such a learning rate no weight changes, so nothing is learned."""


def real(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    tasks = f"{ROOT}/examples/real/tasks.py:held_out_sums"
    sets = [word for one in SHORT.replace("TASKS", tasks).split() for word in ("--set", one)]
    script = [sys.executable, str(ROOT / "studies/real.py"), "--tasks", "arithmetic", "--prompts", "4"]
    command = [*script, "--directory", str(directory), *sets, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)


@pytest.fixture(scope="module")
def first(real_directory: Path) -> subprocess.CompletedProcess[str]:
    return real(real_directory)


def test_a_short_run_of_the_real_model_says_that_it_learned_nothing_and_that_all_else_holds(
    first: subprocess.CompletedProcess[str], real_directory: Path
) -> None:
    assert first.returncode == 1, first.stdout[-3000:] + first.stderr[-3000:]
    assert re.search(r"FAIL  learned: greedy \+0\.000 on arithmetic", first.stdout)
    assert "PASS  nothing lost: 16 admitted = 16 trained (each once)" in first.stdout
    assert re.search(r"PASS  digests equal: (\d+) of \1 swaps", first.stdout)
    assert "PASS  log-prob gap at staleness 0" in first.stdout
    assert (real_directory / "arithmetic.svg").read_text().startswith("<svg")


def test_what_is_done_is_not_done_again(
    first: subprocess.CompletedProcess[str], real_directory: Path
) -> None:
    again = real(real_directory)
    assert again.returncode == 1 and "$ millrace" in first.stdout and "$ millrace" not in again.stdout
    verdicts = [line for line in first.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert [line for line in again.stdout.splitlines() if line.startswith(("PASS", "FAIL"))] == verdicts


def test_more_steps_go_on_with_the_same_run(
    first: subprocess.CompletedProcess[str], real_directory: Path
) -> None:
    longer = real(real_directory, "--set", "steps=3")
    assert "PASS  nothing lost: 24 admitted = 24 trained (each once)" in longer.stdout
    commands = [line.split()[2] for line in longer.stdout.splitlines() if line.startswith("$ millrace")]
    assert commands == ["train", "eval"] and "--resume" in longer.stdout


def test_the_example_in_python_trains_the_model_with_its_own_rows_and_reward(
    real_model: Path, tmp_path: Path
) -> None:
    script = (ROOT / "examples/real/sums.py").read_text()
    short = script.replace("steps=40", "steps=2").replace('"runs/real/model"', repr(str(real_model)))
    (tmp_path / "sums.py").write_text(short)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(tmp_path / "sums.py")]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "step 2/2" in ended.stdout + ended.stderr and "version  reward/mean" in ended.stdout
