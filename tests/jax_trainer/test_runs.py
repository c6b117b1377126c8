"""Whole runs whose trainer computes in JAX: they go on with the trainer in torch, and back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests import runs

from millrace.cli.app import run as millrace

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.smoke
def test_a_run_goes_on_with_the_other_trainer(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = runs.train(start, tmp_path / "whole")
    run = runs.train(start, tmp_path / "run", "trainer.backend=jax", "steps=2")
    checkpoint = run.checkpoints / "v00000002"
    assert millrace(["export", str(run.path), "--out", str(tmp_path / "exported")]) == 0
    exported = tmp_path / "exported" / "model.safetensors"
    assert exported.read_bytes() == (run.model / "model.safetensors").read_bytes()

    sets = ["--set", "trainer.backend=torch", "--set", "steps=4"]
    on = ["train", "--run-dir", str(run.path), "--resume", *sets]
    assert millrace(on) == 1
    assert "millrace convert" in capsys.readouterr().err
    assert millrace(["convert", str(checkpoint), str(run.checkpoints), "--to", "torch"]) == 0
    assert f"For torch: {checkpoint}" in " ".join(capsys.readouterr().out.split())
    assert millrace(on) == 0
    due, found = (load_file(each.model / "model.safetensors") for each in (whole, run))
    for name in due:
        np.testing.assert_allclose(found[name], due[name], atol=1e-5)


class Killer:
    """A sink that sends SIGKILL to the trainer after its second step."""

    def __init__(self) -> None:
        self._pid, self.killed = 0, False

    def __call__(self, event: Any) -> None:
        if event.kind == "worker_started" and event.fields["role"] == "trainer" and not self.killed:
            self._pid = event.fields["pid"]
        if event.kind == "step" and event.fields["version"] == 2 and not self.killed:
            self.killed = True
            os.kill(self._pid, signal.SIGKILL)


def test_a_run_with_an_adapter_publishes_it_alone_and_survives_a_kill(start: Path, tmp_path: Path) -> None:
    adapter = ("trainer.backend=jax", "adapter.rank=4", "optimizer.lr=1e-3")
    undisturbed = runs.train(start, tmp_path / "undisturbed", *adapter)
    model = (start.parent / "start" / "model.safetensors").stat().st_size
    published = runs.events(undisturbed, "published")
    assert published and all(each.fields["weights_bytes"] < model / 2 for each in published)
    assert runs.summary(undisturbed)["logprob_gap_staleness0"]["max"] < 1e-4
    killer = Killer()
    run = runs.train(start, tmp_path / "run", *adapter, sinks=(killer,))
    assert killer.killed and [e.fields["name"] for e in runs.events(run, "worker_died")] == ["trainer"]
    assert runs.weights(run) == runs.weights(undisturbed)
    assert millrace(["export", str(run.path), "--out", str(tmp_path / "exported")]) == 0
    exported = tmp_path / "exported" / "model.safetensors"
    assert exported.read_bytes() == (run.model / "model.safetensors").read_bytes()


def test_a_run_with_a_teacher_and_token_masks_has_the_log_probs_of_replicas(
    start: Path, tmp_path: Path
) -> None:
    teacher = f"algorithm.teacher={start.parent / 'start'}"
    masks = ("sampling.top_p=0.9", "sampling.top_k=20")
    run = runs.train(start, tmp_path / "run", "trainer.backend=jax", "steps=2", teacher, *masks)
    assert runs.summary(run)["logprob_gap_staleness0"]["max"] < 1e-4
    assert len(runs.events(run, "step")) == 2
