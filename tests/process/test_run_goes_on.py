"""A new run that begins from another run's weights, in real processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from tests import runs
from tests.long import few, long

import millrace
from millrace.cli.app import run as command_line
from millrace.config.schema import Config
from millrace.controller.state.groups import make_batch
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import START, RunDirectory

SHORT = ("--set", "optimizer.lr=5e-4", "--set", "steps=2", "--set", "checkpoints.every=1")
DEADLINE_S = 200.0
KILLED_AT_A_STEP = """
import os, signal, sys
from millrace.cli.app import run
from millrace.observe.sinks.jsonl import EventLog

write = EventLog._write

def written(log, event):
    write(log, event)
    if event.kind == "step":
        os.kill(os.getpid(), signal.SIGKILL)

EventLog._write = written
run(sys.argv[1:])
"""


pytestmark = pytest.mark.usefixtures("warm")


def first_update(parent: RunDirectory, child: RunDirectory, config: Config, tmp_path: Path) -> list[Any]:
    """Weights after the first batch of `child`, trained by the parent's optimizer, and by a new one."""
    from millrace.trainer.files.checkpoint import load_checkpoint
    from millrace.trainer.ranks.mesh import ALONE
    from millrace.trainer.role import _policy_trainer

    with LedgerReader(child.ledger) as reader:
        batch = make_batch(0, [reader.group(number) for number in reader.step(1).group_ids])
    made = []
    for keeps in (True, False):
        trainer = _policy_trainer(config, torch.device("cpu"), ALONE)
        load_checkpoint(trainer, parent.checkpoint(2))
        trainer.version = 0
        if not keeps:
            trainer.optimizer.state.clear()
        trainer.step(batch, rejected_dir=tmp_path)
        made.append({name: p.detach().numpy() for name, p in trainer.model.named_parameters()})
    return made


def equal(one: Any, other: Any) -> bool:
    return bool(one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one))


def test_a_new_run_goes_on_with_moments_and_needs_its_parent_no_more(
    undisturbed: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = RunDirectory(shutil.copytree(undisturbed.path, tmp_path / "parent").resolve())
    path = tmp_path / "child"
    words = ["train", "--from", f"{parent.path}@2", "--moments", *SHORT]
    assert command_line([*words, "--run-dir", str(path)]) == 0
    text = "".join(capsys.readouterr().err.split())
    assert f"Beginswithversion2of{parent.path},withtheoptimizer'smoments".replace(" ", "") in text
    child = RunDirectory(path.resolve())
    config, (kept, anew) = child.read_config(), [*first_update(parent, child, child.read_config(), tmp_path)]
    start = load_file(child.path / START / "model.safetensors")
    assert equal(start, load_file(parent.checkpoint(2) / "model.safetensors"))
    after = load_file(child.checkpoint(1) / "model.safetensors")
    assert equal(after, kept) and not equal(after, anew)
    assert (config.optimizer.lr, config.steps, config.seed) == (5e-4, 2, 3)

    shutil.rmtree(parent.path)
    moved = RunDirectory(child.path.rename(tmp_path / "moved"))
    assert command_line(["train", "--run-dir", str(moved.path), "--resume", "--set", "steps=3"]) == 0
    assert moved.versions()[-1] == 3
    lineage = millrace.Run(moved.path).parent
    assert lineage is not None and lineage["run"].startswith("run-")
    assert (lineage["name"], lineage["version"], lineage["moments"]) == ("parent", 2, True)
    capsys.readouterr()
    assert command_line(["show", str(moved.path)]) == 0
    assert "version 2 of parent, with the optimizer's moments" in " ".join(capsys.readouterr().out.split())
    out = tmp_path / "report.html"
    assert command_line(["report", str(moved.path), "--out", str(out)]) == 0
    assert "version 2 of parent, with" in out.read_text()
    capsys.readouterr()
    assert command_line(["compare", str(undisturbed.path), str(moved.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["began with"][0] is None


@pytest.mark.parametrize("begins_with", few(["a checkpoint", "a run"]))
def test_the_command_that_began_a_run_from_another_resumes_it_too(
    begins_with: str, start: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    name = undisturbed.path if begins_with == "a run" else undisturbed.checkpoint(2)
    run = RunDirectory(tmp_path / name.name)
    words = ["--set", f"model.path={name}", "--run-dir", str(run.path), "--set", "checkpoints.every=1"]
    assert command_line(["train", str(start), *words, "--set", "steps=1"]) == 0
    assert command_line(["train", str(start), *words, "--set", "steps=2", "--resume"]) == 0
    assert command_line(["train", *words, "--set", "steps=3", "--resume"]) == 0
    assert run.versions()[-1] == 3


@long
def test_a_run_killed_before_its_first_checkpoint_goes_on_as_if_it_had_not_been(
    start: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    words = ["train", str(start), "--from", f"{undisturbed.path}@2", "--moments"]
    words += ["--set", "checkpoints.every=9", "--set", "optimizer.lr=5e-4"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command_line([*words, "--run-dir", str(whole)]) == 0
    script = tmp_path / "script.py"
    script.write_text(KILLED_AT_A_STEP)
    command = [sys.executable, str(script), *words, "--run-dir", str(killed)]
    done = subprocess.run(command, timeout=DEADLINE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    (step,) = runs.events(RunDirectory(killed), "step")
    assert step.fields["version"] == 1 and RunDirectory(killed).versions() == []
    resume = ["train", str(start), "--run-dir", str(killed), "--resume", "--set", "optimizer.lr=5e-4"]
    assert command_line(resume) == 0  # the file has another `model.path`, and the run keeps its own
    assert runs.weights(RunDirectory(killed)) == runs.weights(RunDirectory(whole))


@long
def test_every_command_that_has_a_model_takes_a_run(
    start: Path, undisturbed: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = start.read_text()
    parent = RunDirectory(shutil.copytree(undisturbed.path, tmp_path / "parent").resolve())
    config = tmp_path / "from_run.toml"
    config.write_text(text.replace('path = "start"', f'path = "{parent.path}"'))
    (tmp_path / "sweep.toml").write_text(f'base = "{config}"\nseeds = [1]\n')
    sweep = ["sweep", str(tmp_path / "sweep.toml"), "--dir", str(tmp_path / "out"), *SHORT]
    assert command_line(sweep) == 0
    trial = RunDirectory((tmp_path / "out" / "seed=1").resolve())
    assert (trial.path / START).is_dir() and trial.versions()[-1] == 2
    assert command_line(["doctor", str(config), "--numerics", "--tokens", "8"]) == 0
    capsys.readouterr()
    assert command_line(["eval", str(config), "--prompts", "1", "--samples", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(parent.path)
    shutil.rmtree(parent.path)
    assert command_line(sweep) == 0  # all trials have ended, and need their parent no more


def test_the_adapter_of_a_parent_is_merged_into_the_start(start: Path, tmp_path: Path) -> None:
    parent = runs.train(start, tmp_path / "parent", "adapter.rank=2", "steps=2")
    words = ["train", str(start), "--set", f"model.path={parent.path}", "--set", "steps=1"]
    assert command_line([*words, "--run-dir", str(tmp_path / "child")]) == 0
    child = RunDirectory((tmp_path / "child").resolve())
    begun, ended = (load_file(path / "model.safetensors") for path in (child.path / START, parent.model))
    assert equal(begun, ended)
    assert child.read_config().model.path == str(child.path / START)


@long
def test_functions_and_rows_of_a_python_run_go_on_with_it(start: Path, tmp_path: Path) -> None:
    value = 0.25
    rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in ("stone", "river", "maple", "cloud")]
    quick: dict[str, Any] = {"rollout.replicas": 1, "checkpoints.every": 1, "steps": 1}
    first = millrace.train(
        start,
        reward=lambda completion, **columns: value + len(completion) % 2,
        rows=rows,
        run_dir=tmp_path / "first",
        **quick,
    )
    second = millrace.train(from_run=first, moments=True, run_dir=tmp_path / "second", steps=2)
    shutil.rmtree(first.path)
    assert second.parent is not None and second.parent["name"] == "first"
    assert {one["reward"] for one in second.trajectories()} <= {0.25, 1.25}
    assert second.resume(steps=3).metrics()[-1]["version"] == 3


def test_options_that_do_not_go_together_are_refused(
    start: Path, undisturbed: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = ["--from", str(undisturbed.path)]
    for words, message in (
        ([*begin, "--run-dir", "x", "--resume"], "--from begins a new run, and --resume goes on with one"),
        ([str(start), "--moments"], "--moments goes with --from"),
        ([*begin, "--set", "model.path=x"], "--from names the weights"),
        ([*begin, "--moments", "--set", "adapter.rank=2"], "`adapter.rank` (None there, 2 here)"),
        (["--from", f"{undisturbed.path}@3"], "no checkpoint of version 3: it keeps 2, 4"),
    ):
        assert command_line(["train", *words]) != 0
        assert message.replace(" ", "") in "".join(capsys.readouterr().err.split()).replace("│", "")
