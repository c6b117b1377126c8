"""Memory and disk from headers alone, and what preflight says of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from millrace.config.schema import Config
from millrace.core.errors import ConfigError, DataError
from millrace.session import preflight as preflight_module
from millrace.session.estimate import estimate, kv_token_bytes, num_parameters
from millrace.session.preflight import preflight

MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_safetensors(directory / "model-1.safetensors", {"a": [10, 20], "b": [5]})
    write_safetensors(directory / "model-2.safetensors", {"c": []})
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def config_for(model: Path, **sections: object) -> Config:
    task = {"kind": "gym", "name": "chain_sum"}
    return Config.model_validate(
        {"model": {"path": str(model)}, "task": task, "reward": {"kind": "gym"}, **sections}
    )


def test_parameters_are_counted_over_all_files_without_reading_tensors(model: Path) -> None:
    assert num_parameters(model) == 10 * 20 + 5 + 1


def test_kv_counts_key_value_heads_not_query_heads() -> None:
    assert kv_token_bytes(MODEL, 4) == 2 * 2 * 2 * 8 * 4
    assert kv_token_bytes(MODEL | {"head_dim": 16}, 2) == 2 * 2 * 2 * 16 * 2
    assert kv_token_bytes({k: v for k, v in MODEL.items() if "key_value" not in k}, 4) == 2 * 2 * 4 * 8 * 4


def test_the_estimate_adds_up(model: Path) -> None:
    config = config_for(
        model,
        rollout={"replicas": 3, "slots": 2, "max_sequence_tokens": 256},
        schedule={"kind": "areal", "eta": 1},
    )
    needs = estimate(config)
    assert needs.weights_bytes == 206 * 4
    assert needs.kv_replica_bytes == 256 * 2 * 256
    assert needs.replica_bytes == 2 * 206 * 4 + 256 * 2 * 256
    assert needs.relay_bytes == 4 * 206 * 4
    assert needs.total_bytes == 3 * needs.replica_bytes + needs.trainer_bytes + needs.relay_bytes


def test_a_broken_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        num_parameters(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="is not a safetensors file"):
        num_parameters(tmp_path)
    with pytest.raises(DataError, match="has no 'num_attention_heads'"):
        kv_token_bytes({}, 4)


def test_preflight_names_everything_that_is_missing_at_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = config_for(
        tmp_path / "model",
        task={"kind": "file", "path": str(tmp_path / "rows.jsonl")},
        reward={"kind": "function", "path": str(tmp_path / "score.py:reward")},
    )
    with pytest.raises(ConfigError) as caught:
        preflight(config, tmp_path)
    said = str(caught.value)
    assert "has no config.json" in said
    assert "has no *.safetensors weights" in said
    assert "has no tokenizer" in said
    assert "`task.path`" in said
    assert "`reward.path`" in said


def test_preflight_says_how_a_model_that_is_only_a_name_becomes_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf download OWNER/MODEL"):
        preflight(config_for(tmp_path / "Qwen" / "Qwen3-0.6B"), tmp_path)


def test_preflight_calls_a_schedule_of_ones_own(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make(config, more):\n    pass\n")
    own = {"kind": "function", "path": f"{tmp_path / 'own.py'}:make"}
    with pytest.raises(ConfigError, match=r"schedule.path.*TypeError.*'more'"):
        preflight(config_for(model, schedule=own), tmp_path)


def test_preflight_refuses_a_disk_that_is_too_small(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda path: _Usage(free=100))
    with pytest.raises(ConfigError, match=r"checkpoints\.keep"):
        preflight(config_for(model), tmp_path / "runs" / "new")


def test_preflight_warns_of_threads_that_spin_on_each_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert any("OMP_NUM_THREADS=64" in warning for warning in preflight(config_for(model), tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert preflight(config_for(model), tmp_path) == []


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free
