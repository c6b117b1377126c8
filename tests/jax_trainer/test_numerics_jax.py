"""A fault in the trainer in JAX is named at its layer and operation; honest models have none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from numerics_faults import FAULTS, HONEST, TOKENS, faulty_model, honest_model

from millrace.checks import numerics
from millrace.checks.numerics import Divergence, first_divergence
from millrace.cli.app import run as millrace
from millrace.trainer.hooked_values import reference_values
from millrace_jax import forward
from millrace_jax.traced_values import traced_values


def compared(honest: Path, model: Path, dtype: str = "float32", *mesh: int) -> Divergence | None:
    options: dict[str, Any] = {"published": dtype, "temperature": 0.7}
    reference, _ = reference_values(honest, TOKENS, **options)
    values, computing = traced_values(model, TOKENS, **options, mesh=mesh or (1, 1, 1))
    assert set(reference) - set(values) <= {"logits"}
    return first_divergence(reference, values, computing)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    honest = honest_model(tmp_path / "honest", fault.family)
    first = compared(honest, faulty_model(honest, fault))
    assert first is not None and (first.layer, first.operation) == (fault.layer, fault.operation)


@pytest.mark.parametrize("family", [*HONEST, "gemma2", "qwen2, windows", "mistral, yarn, no windows"])
def test_an_honest_model_has_none(family: str, tmp_path: Path) -> None:
    honest = honest_model(tmp_path, family)
    assert compared(honest, honest) is None
    assert compared(honest, honest, "bfloat16") is None


def test_an_honest_model_on_a_mesh_has_none(tmp_path: Path) -> None:
    honest = honest_model(tmp_path, "qwen3")
    assert compared(honest, honest, "float32", 2, 2, 2) is None


def test_the_command_asks_the_python_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, config = honest_model(tmp_path / "model", "llama"), tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=honest, python=sys.executable))
    monkeypatch.setattr(numerics, "has_jax", lambda: False)
    assert millrace(["doctor", str(config), "--numerics", "--tokens", "20"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(*words[:2], words[-1]) for words in said[1:]] == [
        ("trainer", "(jax)", "none"),
        ("torch", "engine", "none"),
    ]


CONFIG = """
[model]
path = "{model}"
device = "cpu"
[trainer]
backend = "jax"
python = "{python}"
[task]
kind = "file"
path = "rows.jsonl"
[reward]
kind = "exact"
"""


@pytest.mark.parametrize(
    "function, operation", [("_rotated", "q_rope"), ("attention", "attention"), ("_norm", "input_norm")]
)
def test_a_fault_of_the_program_itself_is_named(
    function: str, operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, right = honest_model(tmp_path, "llama"), getattr(forward, function)
    monkeypatch.setattr(forward, function, lambda *args, **options: right(*args, **options) * 1.01)
    first = compared(honest, honest)
    assert first is not None and (first.layer, first.operation) == (0, operation)
