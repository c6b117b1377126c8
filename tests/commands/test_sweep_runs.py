"""`millrace sweep` in real processes: killed, interrupted, with a trial that dies, and with a rule."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.runs import events, summary

import millrace
from millrace.run_directory.run_directory import RunDirectory
from millrace_sweeps import driver

WAIT_S = 100.0
STEPS, EACH = 5, 16

pytestmark = pytest.mark.usefixtures("warm")


REWARD = """
import time
from pathlib import Path

def reward(completion):
    while {hold}.exists() and {metrics}.exists() and {metrics}.stat().st_size:
        time.sleep(0.01)
    return float(len(completion))
"""


def written(start: Path, tmp_path: Path, text: str, paused: str) -> list[str]:
    """The command of a sweep of the small run. After its first step the trial `paused` waits for the end of
    the file `hold`."""
    file = tmp_path / "sweep.toml"
    file.write_text(f'base = "{start}"\n{text}')
    (tmp_path / "hold").touch()
    hold, metrics = (f"Path({str(tmp_path / name)!r})" for name in ("hold", f"out/{paused}/metrics.jsonl"))
    (tmp_path / "score.py").write_text(REWARD.format(hold=hold, metrics=metrics))
    command = [sys.executable, "-m", "millrace", "sweep", str(file), "--dir", str(tmp_path / "out")]
    sets = (f"steps={STEPS}", "rollout.replicas=1", "checkpoints.every=1")
    sets += ("reward.kind=function", f"reward.path={tmp_path / 'score.py'}:reward")
    return [*command, *(word for one in sets for word in ("--set", one))]


def wait_for(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=10)
        time.sleep(0.02)


def has_stepped(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def popen(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def states(out: Path) -> dict[str, str]:
    trials: dict[str, dict[str, Any]] = json.loads((out / "sweep.json").read_text())["trials"]
    return {name: trial["state"] for name, trial in trials.items()}


def ended_once(run: Path) -> bool:
    """Every step is made, and every trajectory trained, exactly once."""
    directory = RunDirectory(run)
    steps = [line.fields["version"] for line in events(directory, "step") if not line.fields["replayed"]]
    accounts = summary(directory)["accounting"]
    return steps == list(range(1, STEPS + 1)) and accounts["trained"] == accounts["admitted"] == STEPS * EACH


@long
def test_a_sweep_that_is_killed_goes_on_and_every_trial_ends_once(start: Path, tmp_path: Path) -> None:
    out, names = tmp_path / "out", [f"lr={lr},seed={seed}" for seed in (1, 2) for lr in ("0.001", "0.0001")]
    text = 'seeds = [1, 2]\n[grid]\n"optimizer.lr" = [1e-3, 1e-4]\n'
    command = written(start, tmp_path, text, paused=names[1])
    with popen(command) as sweep:
        wait_for(lambda: has_stepped(out / names[1]), sweep)
        sweep.kill()
    (tmp_path / "hold").unlink()
    assert list(states(out).values()) == ["finished", "running", "waiting", "waiting"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert states(out) == dict.fromkeys(names, "finished")
    assert all(ended_once(out / name) for name in names)
    starts = [len(events(RunDirectory(out / name), "run_started")) for name in names]
    assert starts == [1, 2, 1, 1]
    assert "compare" in done.stdout and "millrace ui" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert again.returncode == 0 and "4 trials: 4 finished" in again.stdout
    assert [one["trials"] for one in millrace.Sweep(out).ranking()] in (
        [names[::2], names[1::2]],
        [names[1::2], names[::2]],
    )


def owner_of(run: Path) -> int | None:
    """The process that holds the ledger's lock."""
    lock = run / "ledger.sqlite.lock"
    inode = f":{lock.stat().st_ino}" if lock.exists() else ":none"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return next((int(cells[4]) for cells in lines if cells[1] == "FLOCK" and cells[5].endswith(inode)), None)


@long
def test_an_interrupt_saves_and_a_trial_that_dies_is_told_and_retried_when_asked(
    start: Path, tmp_path: Path
) -> None:
    command, out = written(start, tmp_path, "seeds = [1, 2]\n", paused="seed=2"), tmp_path / "out"
    with popen(command) as sweep:
        wait_for(lambda: has_stepped(out / "seed=1"), sweep)
        os.kill(sweep.pid, signal.SIGINT)
        said = sweep.communicate(timeout=WAIT_S)[0]
    assert sweep.returncode == 130 and "nothing is lost. To go on: " in said
    assert states(out)["seed=1"] in ("interrupted", "finished")
    with popen(command) as sweep:
        wait_for(lambda: has_stepped(out / "seed=2") and owner_of(out / "seed=2") is not None, sweep)
        owner = owner_of(out / "seed=2")
        assert owner is not None
        os.kill(owner, signal.SIGKILL)
        said = sweep.communicate(timeout=WAIT_S)[0]
    assert sweep.returncode == 1, said
    assert states(out) == {"seed=1": "finished", "seed=2": "failed"}
    assert "failed: seed=2: WorkerDied" in said
    (tmp_path / "hold").unlink()
    done = subprocess.run([*command, "--retry"], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert all(ended_once(out / name) for name in ("seed=1", "seed=2"))


@long
def test_a_rule_stops_a_trial_of_a_script_whose_accounts_close(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "POLL_S", 0.01)
    longer, stop = len("x"), driver._Live.stop
    asked, metrics = tmp_path / "asked", tmp_path / "out" / "lr=0.0001" / "metrics.jsonl"

    def reward(completion: str, **columns: Any) -> float:
        while metrics.exists() and metrics.read_text().count("\n") >= 2 and not asked.exists():
            time.sleep(0.01)
        return float(len(completion) > longer)

    monkeypatch.setattr(driver._Live, "stop", lambda live: (asked.touch(), stop(live)))
    sweep = millrace.sweep(
        {
            "base": str(start),
            "grid": {"optimizer.lr": [1e-3, 1e-4]},
            "metric": "trainer/lr",
            "stop": {"kind": "halving", "steps_min": 2, "factor": 2},
        },
        reward=reward,
        rows=[{"prompt": "stone>"}, {"prompt": "river>"}],
        directory=tmp_path / "out",
        show=False,
        steps=12,
        **{"rollout.replicas": 1},
    )
    first, second = sweep.trials()
    assert (first["state"], first["value"], second["state"]) == ("finished", 1e-3, "stopped")
    assert "step 2: its value 0.0001 is in place 2 of 2" in second["reason"]
    assert 2 <= second["step"] < 12
    run = sweep.run(second["name"])
    accounts = run.summary()["accounting"]
    admitted = accounts.pop("admitted")
    assert run.state == "stopped" and admitted == sum(accounts.values())
    assert accounts["trained"] == second["step"] * EACH
    assert [one["value"] for one in sweep.ranking()] == [1e-3, pytest.approx(1e-4)]
