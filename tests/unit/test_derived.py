"""What `--dry-run` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.checks.derived import derived, resolved_lines
from millrace.config.freeze import dump
from millrace.config.load import load

BASE = (
    '[model]\npath = "m"\n[task]\nkind = "gym"\nname = "gcd"\noptions = { a = [1, 2], b = "x\\ty" }\n'
    '[reward]\nkind = "gym"\n[batch]\nprompts = 4\ngroup_size = 2\n[sampling]\nmax_tokens = 10\n'
)


@pytest.mark.parametrize("kind", ["synchronous", "llamarl", "areal", "laminar", "rlax"])
def test_the_resolved_configuration_loads_to_the_same_one(tmp_path: Path, kind: str) -> None:
    (tmp_path / "run.toml").write_text(BASE)
    config = load(tmp_path / "run.toml", [f"schedule={kind}"])
    lines = resolved_lines(dump(config))
    (tmp_path / "resolved.toml").write_text("\n".join(lines))
    assert load(tmp_path / "resolved.toml") == config
    assert lines[lines.index("[schedule]") + 1] == f'kind = "{kind}"'


def test_the_batch_arithmetic_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(BASE)
    tables = derived(load(tmp_path / "run.toml", ["steps=7"]))
    assert tables["Batch"]["trajectories a step"] == "4 prompts x 2 = 8"
    assert tables["Batch"]["completion tokens a step, at most"] == "8 x 10 = 80"
    assert tables["Batch"]["trajectories of the run"] == "7 steps x 8 = 56"


def test_a_model_that_is_not_there_leaves_only_its_numbers_out(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(BASE)
    tables = derived(load(tmp_path / "run.toml"))
    assert "no *.safetensors file" in tables["Memory"]["unknown"]
    assert tables["Schedule"]["staleness, worst case"] == "4 versions"
