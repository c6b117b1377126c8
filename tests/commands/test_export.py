"""Models out of a run that was stopped or goes on: of any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests import runs
from tests.long import long

from millrace import Run
from millrace.cli.app import run as millrace

pytestmark = pytest.mark.usefixtures("warm")


@long
def test_any_checkpoint_can_be_exported_and_evaluated(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.train(start, tmp_path / "run")
    assert millrace(["export", str(run.path)]) == 0
    assert "Version 4" in capsys.readouterr().out
    at_the_end = load_file(run.model / "model.safetensors")
    newest = load_file(run.path / "exports" / "v00000004" / "model.safetensors")
    assert at_the_end.keys() == newest.keys()
    assert all((at_the_end[name] == newest[name]).all() for name in newest)

    out = tmp_path / "earlier"
    assert Run(run.path).export(2, out) == out
    earlier = load_file(out / "model.safetensors")
    assert any((earlier[name] != newest[name]).any() for name in newest)
    assert millrace(["export", str(run.path), "--version", "3"]) == 1
    assert "no checkpoint of version 3: it keeps 2, 4" in capsys.readouterr().err

    for model in (run.path, run.checkpoints / "v00000002"):
        assert millrace(["eval", str(start), "--model", str(model), "--prompts", "2", "--samples", "1"]) == 0
        assert f"{model}, 2 prompts" in " ".join(capsys.readouterr().out.split())
    kept = map(json.loads, run.evaluations.read_text().splitlines())
    assert [(line["version"], line["num_prompts"]) for line in kept] == [(4, 2), (2, 2)]
