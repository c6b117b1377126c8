"""`import millrace` in real processes: functions of scripts, closures, live records, resume, interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.long import few, long

import millrace
from millrace.cli.app import run as command_line
from millrace.core.errors import ConfigError, DataError, LedgerError

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"rollout.replicas": 1, "checkpoints.every": 1}
ROWS = [{"prompt": f"{word}>", "answer": word[::-1]} for word in ("stone", "river", "maple", "cloud")]

SCRIPT = """
import sys
import millrace

def share(a, b):
    return sum(x == y for x, y in zip(a, b)) / max(len(a), len(b), 1)

def reward(completion, answer):
    return {"reward": share(completion, answer), "marked": 7.0}

rows = [{"prompt": "stone>", "answer": "enots"}, {"prompt": "river>", "answer": "revir"}]
run = millrace.train(sys.argv[1], reward=reward, rows=rows, run_dir=sys.argv[2], **{"rollout.replicas": 1})
assert run.state == "finished", run
assert {one["reward/marked"] for one in run.trajectories()} == {7.0}
assert "torch" not in sys.modules
print("steps:", [step["version"] for step in run.metrics()])
"""


pytestmark = pytest.mark.usefixtures("warm")


@long
def test_a_reward_of_a_scripts_main_trains_without_a_guard(start: Path, tmp_path: Path) -> None:
    (tmp_path / "fresh.py").write_text(SCRIPT)  # by a Python that has imported nothing
    command = [sys.executable, str(tmp_path / "fresh.py"), str(start), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps: [1, 2, 3, 4]" in done.stdout


@long
def test_a_closure_trains_live_in_a_running_loop_and_the_run_is_resumed(start: Path, tmp_path: Path) -> None:
    import datasets

    value = 0.25

    async def notebook() -> millrace.Run:
        run = millrace.train(
            start,
            reward=lambda completion, **columns: value + len(completion) % 2,
            rows=datasets.Dataset.from_list(ROWS),
            run_dir=tmp_path / "run",
            wait=False,
            steps=3,
            **QUICK,
        )
        with pytest.raises(LedgerError, match="is being trained already"):
            run.resume()
        frames = [run.trajectories(step["version"], tokens=True).frame() async for step in run]
        assert all(len(frame) == 16 and frame.reward.isin([0.25, 1.25]).all() for frame in frames)
        assert all(map(len, frames[0].tokens))
        assert [step["version"] for step in run.steps()] == [1, 2, 3]
        return await run

    run = asyncio.run(notebook())
    assert (run.state, run.summary()["accounting"]["trained"]) == ("finished", 48)
    assert [event["version"] for event in run.events("step")] == [1, 2, 3]
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    resume = ["train", "--run-dir", str(moved), "--resume", "--set", "steps=4"]
    assert command_line(resume) == 0  # what is carried went with the directory
    again = millrace.Run(moved)
    assert [step["version"] for step in again.metrics()] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="`seed`: 3 -> 9"):
        again.resume(seed=9)
    with pytest.raises(DataError, match="no prompt is left to evaluate on"):
        millrace.evaluate(again, prompts=3, samples=0)
    evaluation = millrace.evaluate(again, prompts=3, samples=2, with_trained=True)
    assert (evaluation.num_prompts, evaluation.num_unscored, evaluation.model) == (3, 0, str(again.model))


@long
def test_a_list_of_rewards_trains_with_a_flaky_function_and_one_of_trl(start: Path, tmp_path: Path) -> None:
    calls: list[str] = []

    def flaky(completion: str) -> float:
        calls.append(completion)
        if len(calls) % 2:
            raise OSError("busy")
        return float(len(completion))

    def opinions(completions: list[str], **columns: list[str]) -> list[float | None]:
        return [1.0 if len(one) % 2 else None for one in completions]

    own = {"kind": "function", "path": flaky, "attempts": 2, "backoff_s": 0.001}
    trl = {"kind": "function", "path": opinions, "signature": "trl"}
    rewards = [
        {"name": "own", "weight": 0.5, "reward": own},
        {"name": "odd", "leave_out": "abstained", "reward": trl},
    ]
    run = millrace.train(
        start, reward=rewards, rows=ROWS, run_dir=tmp_path / "run", show=False, steps=2, **QUICK
    )
    assert (run.state, run.summary()["accounting"]["failed"]) == ("finished", 0)
    for one in run.trajectories():
        odd = one.get("reward/odd") or 0.0
        assert one["reward"] == pytest.approx(0.5 * one["reward/own"] + odd)
        assert (one["reward/own/attempts"], one["reward/odd/abstained"]) == (2.0, 1.0 - odd)
    for step in run.metrics():
        assert step["reward_metrics/own/attempts"] == 2.0 and 0 <= step["reward_metrics/odd/abstained"] <= 1
    evaluation = millrace.evaluate(run, prompts=2, samples=1, with_trained=True)
    assert evaluation.num_unscored < 4


@long
def test_a_function_of_the_script_gets_each_step_and_evaluation_and_stops_the_run(
    start: Path, tmp_path: Path
) -> None:
    steps, evaluations = list[dict[str, Any]](), list[dict[str, Any]]()

    def on_step(step: dict[str, Any]) -> Any:
        steps.append(step)
        return millrace.STOP if len(steps) >= 2 and evaluations else None

    run = millrace.train(
        start,
        run_dir=tmp_path / "run",
        steps=100_000,
        evaluations=[{"name": "same", "every": 1, "prompts": 2, "samples": 1}],
        on_step=on_step,
        on_evaluation=evaluations.append,
        show=False,
        **QUICK,
    )
    assert run.state == "stopped"
    assert steps == run.metrics()[: len(steps)]
    assert [one["version"] for one in evaluations] == list(range(len(evaluations)))
    assert [one["greedy"] for one in evaluations] == [one["greedy"] for one in run.evaluations()][
        : len(evaluations)
    ]
    counts = run.summary()["accounting"]
    done = len(run.metrics())
    assert counts["trained"] == 16 * done
    later = list[dict[str, Any]]()
    run.resume(steps=done + 1, on_step=later.append, show=False)
    assert [one["version"] for one in later] == [done + 1]


@long
def test_what_a_function_of_the_script_raises_ends_the_run_and_is_raised(start: Path, tmp_path: Path) -> None:
    def on_step(step: dict[str, Any]) -> None:
        raise KeyError(step["version"])

    with pytest.raises(KeyError, match="1") as raised:
        millrace.train(start, run_dir=tmp_path / "run", steps=100_000, on_step=on_step, show=False, **QUICK)
    assert raised.traceback[-1].name == "on_step"
    run = millrace.Run(tmp_path / "run")
    assert (run.state, run.summary()["steps"]) == ("stopped", len(run.metrics()))
    with pytest.raises(ConfigError, match="Pass them to `run"):
        run.resume(on_step=print, wait=False)


def test_what_ends_a_run_is_raised_in_the_script(start: Path, tmp_path: Path) -> None:
    with pytest.raises(millrace.DataError, match="none of the first 4 rows can be used"):
        millrace.train(
            start,
            reward=lambda completion: 0.0,
            rows=ROWS,
            run_dir=tmp_path / "run",
            task={"template": "{x}"},
            show=False,
        )


@long
def test_an_interrupt_finishes_the_step_and_the_run_goes_on_later(start: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("**{", "steps=100_000, **{"))
    command = [sys.executable, str(tmp_path / "script.py"), str(start), str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as script:
        deadline = time.monotonic() + 200
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(script.pid, signal.SIGINT)
        said = script.communicate(timeout=280)[1]
    assert "KeyboardInterrupt" in said
    assert "Stopped; nothing is lost. To go on: millrace.Run(" in said
    run = millrace.Run(tmp_path / "run")
    assert run.state == "stopped"
    done = len(run.metrics())
    assert len(run.resume(steps=done + 1, show=False).metrics()) == done + 1


@long
def test_a_run_that_is_left_in_the_background_ends_with_its_script(start: Path, tmp_path: Path) -> None:
    left = SCRIPT.replace("**{", "steps=100_000, wait=False, **{").partition("assert run.state")[0]
    (tmp_path / "script.py").write_text(left + "next(run.steps())")
    command = [sys.executable, str(tmp_path / "script.py"), str(start), str(tmp_path / "run")]
    subprocess.run(command, capture_output=True, timeout=280, check=True)
    run = millrace.Run(tmp_path / "run")
    assert run.state == "stopped"
    assert run.summary()["accounting"]["trained"] > 0


@long
def test_questions_are_answered_in_a_running_loop() -> None:
    root = ROOT / "examples"

    async def notebook() -> None:
        records = millrace.simulate(root / "cluster.toml", compare=["laminar"], seeds=2, **{"steps": 3})
        assert [(one["schedule"], one["step_s"] > 0) for one in records] == [("laminar", True)] * 2
        assert list(records.frame()["seed"]) == [records[0]["seed"], records[0]["seed"] + 1]
        best = millrace.plan(root / "plan.toml", search={"simulations": 1, "steps": 3})
        assert best["ranking"][0]["tokens_per_s"] > 0

    asyncio.run(notebook())


def small_start(folder: Path, start: Path) -> None:
    (folder / "runs" / "quickstart").mkdir(parents=True)
    (folder / "runs" / "quickstart" / "start").symlink_to(start.parent / "start")


@pytest.mark.timeout(240)  # a guard: half a minute on a quiet machine
@pytest.mark.parametrize("name", few(["README.md", "examples/notebook.py"]))
def test_the_example_runs_as_it_stands(name: str, start: Path, tmp_path: Path) -> None:
    """But for its number of steps, from another small model where it says that the quickstart's lies."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        text = text.partition("```python\n")[2].partition("```")[0]
    shorter = {"steps=60": "steps=2", "version=60": "version=2", "steps=40": "steps=2", "steps=50": "steps=3"}
    for old, new in shorter.items():
        text = text.replace(old, new)
    small_start(tmp_path, start)
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    assert "reward/mean" in done.stdout
    run = millrace.Run(tmp_path / "runs")
    assert (run.state, len(run.metrics())) == ("finished", 2 if name.endswith(".md") else 3)
