"""A fault in the trainer or in the engine is named at its layer and operation; honest models have none."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import flash_double
import numpy as np
import pytest
from ledger_records import grow, ready_group
from numerics_faults import FAULTS, HONEST, TOKENS, faulty_model, honest_model
from tests.long import covering
from trainer_doubles import role_config, tiny_model

from millrace.checks.numerics import Divergence, first_divergence, logprob_gap, recorded_sequence
from millrace.cli.app import run as millrace
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.engines.own import torch_engine
from millrace.engines.own.engine_values import engine_values
from millrace.ledger import SqliteLedger
from millrace.trainer import hooked_values
from millrace.trainer.hooked_values import reference_values, trainer_values
from millrace.trainer.model import load_model

SIDES = ["trainer", "engine", "engine without C", "exact engine"]


def compared(
    side: str, honest: Path, model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32"
) -> tuple[Divergence | None, float]:
    options: dict[str, Any] = {"published": dtype, "temperature": 0.7}
    reference, _ = reference_values(honest, TOKENS, **options)
    if side == "trainer":
        values, computing = trainer_values(model, TOKENS, **options, device="cpu")
    else:
        if side == "engine without C":
            monkeypatch.setattr(torch_engine, "native_pass", lambda *args, **options: (None, ""))
        if side == "engine as on a GPU":
            flash_double.install(monkeypatch)
        exact = side == "exact engine"
        values, computing = engine_values(model, TOKENS, **options, device="cpu", exact=exact)
    return first_divergence(reference, values, computing), logprob_gap(reference, values)[0]


@pytest.mark.parametrize("side", SIDES[:3])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    honest = honest_model(tmp_path / "honest", fault.family)
    first, gap = compared(side, honest, faulty_model(honest, fault), monkeypatch)
    assert first is not None and (first.layer, first.operation) == (fault.layer, fault.operation)
    assert first.distance > 2 * first.bound and gap > 1e-4


@pytest.mark.parametrize(
    ("family", "side"),
    covering([*HONEST, "gemma2", "granite", "phi3", "glm4", "smollm3"], [*SIDES[:3], "engine as on a GPU"]),
)
def test_an_honest_model_has_none(
    family: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = honest_model(tmp_path, family)
    for dtype in ("float32", "bfloat16"):
        first, gap = compared(side, honest, honest, monkeypatch, dtype)
        assert first is None, first
        assert gap < (1e-4 if dtype == "float32" else 0.2)


def values_of(**changes: Any) -> dict[str, Any]:
    names = "embedding", "layers.0.q", "layers.0.output", "layers.1.q", "norm"
    return {name: np.ones((3, 4)) for name in names} | {"logprobs": -np.ones(3)} | changes


def test_the_first_value_over_its_bound_is_named_and_no_later_one() -> None:
    off = np.full((3, 4), 1.1)
    first = first_divergence(values_of(), values_of(**{"layers.1.q": off, "norm": off}), "float32")
    assert first is not None and str(first).startswith("layer 1: q, the query projection: off by 1.0e-01,")


@pytest.mark.parametrize("wrong", [np.full((3, 4), np.nan), np.ones((3, 2))])
def test_what_is_no_number_or_has_another_shape_diverges(wrong: Any) -> None:
    first = first_divergence(values_of(), values_of(norm=wrong), "bfloat16")
    assert first is not None and (first.layer, first.operation) == (None, "norm")


def test_a_side_with_log_probs_alone_is_compared_by_them() -> None:
    reference = {"logprobs": np.array([-0.5, -8.0])}
    assert first_divergence(reference, {"logprobs": np.array([-0.500004, -8.00005])}, "float32") is None
    first = first_divergence(reference, {"logprobs": np.array([-0.5, -8.001])}, "float32")
    assert first is not None and first.operation == "logprobs"


CONFIG = """
[model]
path = "{model}"
device = "cpu"
[task]
kind = "file"
path = "rows.jsonl"
[reward]
kind = "exact"
"""


def test_the_command_compares_trainer_and_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = honest_model(tmp_path / "model", "llama"), tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=model))
    monkeypatch.chdir(tmp_path)
    assert millrace(["doctor", str(config), "--numerics", "--tokens", "20"]) == 0
    output = capsys.readouterr()
    said = [line.split() for line in output.out.splitlines()]
    assert [(words[0], words[-1]) for words in said[1:]] == [("trainer", "none"), ("torch", "none")]
    assert "log-probs of replicas (own) are not compared: the ledger has none" in output.err


def test_the_command_says_that_a_quantised_trainer_is_compared_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = honest_model(tmp_path / "model", "llama"), tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=model) + '[trainer]\nquantization = "fp8"\n')
    monkeypatch.chdir(tmp_path)
    assert millrace(["doctor", str(config), "--numerics", "--tokens", "20"]) == 0
    assert "the trainer computes without `trainer.quantization`" in capsys.readouterr().err


def test_the_command_names_the_side_and_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the reference reads the honest model here."""
    fault, config = FAULTS["q and k"], tmp_path / "run.toml"
    honest = honest_model(tmp_path / "model", fault.family)
    faulty = faulty_model(honest, fault)
    config.write_text(CONFIG.format(model=honest))
    monkeypatch.setattr(hooked_values, "load_model", lambda path, device: load_model(faulty, device))
    assert millrace(["doctor", str(config), "--numerics"]) == 1
    output = capsys.readouterr().out
    assert "trainer (torch) diverges at layer 1: q, the query projection: off by" in output
    assert "torch engine diverges" not in output


def test_the_record_gives_tokens_of_one_version_with_their_log_probs(tmp_path: Path) -> None:
    group = ready_group(0, version=2, num_tokens=4)
    for member in group.members:
        grow(member, 3, version=3)
    with closing(SqliteLedger(tmp_path / "ledger.sqlite", run={})) as ledger:
        ledger.admit([group])
    found = partial(recorded_sequence, ledger=tmp_path / "ledger.sqlite")
    config = Config.model_validate(role_config("model"))
    sequence = found(config, version=2, num_tokens=6)
    assert sequence is not None and sequence.tokens == [1, 2, 3, 1000, 1001, 1002]
    assert sequence.recorded is not None and sequence.recorded.tolist() == [-0.5, -1.5, -2.5]
    assert found(config, version=3, num_tokens=6) is None
    capped = Config.model_validate(role_config("model", sampling={"top_k": 5}))
    too_few, cut = found(config, version=2, num_tokens=3), found(capped, version=2, num_tokens=6)
    assert too_few is not None and too_few.recorded is None and "3 tokens: raise --tokens" in too_few.why
    assert cut is not None and cut.recorded is None and "more than its temperature" in cut.why


def test_a_mixture_of_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "model")
    make_character_tokenizer(tmp_path / "model", "0123456789")
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=tmp_path / "model"))
    assert millrace(["doctor", str(config), "--numerics"]) == 1
    assert "is a mixture of experts" in capsys.readouterr().err
