"""Memory and disk from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from millrace.config.schema import Config
from millrace.core.errors import ConfigError, DataError
from millrace.placement import number_format
from millrace.placement.memory.model_shape import kv_token_bytes
from millrace.placement.memory.needs import MemoryNeed, read_needs
from millrace.placement.model_directory import tensor_elements

MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
PARAMETERS, LARGEST = 206, 200
MATRIX_GRADIENT = 6 * 32 * 128  # of a matrix between hidden and intermediate, in two formats
TIED_PROJECTION = 8 * (LARGEST // 32) * 32  # gathered, and its gradient
KV = 256  # bytes of a token in float32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    zeros = {"a": np.zeros((10, 20), np.float32), "b": np.zeros(5, np.float32)}
    save_file(zeros, directory / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"c": np.zeros((), np.float32)}, directory / "model-2.safetensors")
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


def config_for(model: Path, dtype: str, **sections: object) -> Config:
    task = {"kind": "gym", "name": "chain_sum"}
    rollout = {"slots": 2, "max_sequence_tokens": 256}
    whole = {"model": {"path": str(model), "dtype": dtype}, "task": task, "reward": {"kind": "gym"}}
    return Config.model_validate({**whole, "rollout": rollout, **sections})


def test_parameters_are_counted_over_all_files(model: Path) -> None:
    assert tensor_elements(model) == {"a": 200, "b": 5, "c": 1}


@pytest.mark.parametrize("indexed", [True, False])
def test_what_is_there_in_another_form_too_counts_once(model: Path, indexed: bool) -> None:
    """As in repositories with a `consolidated.safetensors`."""
    zeros = {"other_name": np.zeros(206, np.float32)}
    save_file(zeros, model / "consolidated.safetensors")
    if indexed:
        files = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        assert tensor_elements(model) == {"a": 200, "b": 5, "c": 1}
    else:
        save_file({"a": np.zeros(3, np.float32)}, model / "model.safetensors")
        assert tensor_elements(model) == {"a": 3}


def test_an_index_that_is_damaged_is_told(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DataError, match="does not say where each tensor is"):
        tensor_elements(model)


def test_kv_counts_key_value_heads_not_query_heads() -> None:
    assert kv_token_bytes(MODEL, 4) == 2 * 2 * 2 * 8 * 4
    assert kv_token_bytes(MODEL | {"head_dim": 16}, 2) == 2 * 2 * 2 * 16 * 2
    assert kv_token_bytes({k: v for k, v in MODEL.items() if "key_value" not in k}, 4) == 2 * 2 * 4 * 8 * 4


def divided(model: Path, parts: int) -> Config:
    rollout = {"slots": 2, "max_sequence_tokens": 256, "tensor": parts}
    return config_for(model, "float32", rollout=rollout)


def test_each_device_of_a_replica_has_a_part_of_the_weights_and_a_key_head_at_least(model: Path) -> None:
    in_two, in_four = (read_needs(divided(model, parts), on_gpu=True) for parts in (2, 4))
    assert in_two.replica.device_bytes == (8 * PARAMETERS + 512 * KV) // 2
    assert in_four.replica.device_bytes == (8 * PARAMETERS + 512 * 2 * KV) // 4  # two key heads, each twice
    assert kv_token_bytes(MODEL, 4, 2) == KV // 2 == kv_token_bytes(MODEL, 4, 4)
    on_cpu = read_needs(divided(model, 2), on_gpu=False)
    assert on_cpu.replica == read_needs(divided(model, 1), on_gpu=False).replica


def test_a_degree_that_does_not_divide_the_heads_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)`rollout.tensor` \(3\) .* 4 attention heads.*divisor of 2"):
        read_needs(divided(model, 3), on_gpu=False)
    with pytest.raises(ConfigError, match=r"(?s)`rollout.tensor` \(8\) .*: it has 4 attention heads a layer"):
        read_needs(divided(model, 8), on_gpu=False)


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_ranks_of_the_trainer_that_do_not_divide_its_heads_are_refused(model: Path, axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)`trainer.{axis}` \(3\).* 4 attention heads.*divisor of 2"):
        read_needs(config_for(model, "float32", trainer={axis: 3}), on_gpu=False)
    with pytest.raises(
        ConfigError, match=r"(?s)`trainer.tensor` \(2\) x `trainer.sequence` \(2\) .* 2 key heads"
    ):
        read_needs(config_for(model, "float32", trainer={"tensor": 2, "sequence": 2}), on_gpu=False)


def test_a_reference_apart_is_not_in_the_trainer(model: Path) -> None:
    plain, copy, apart = (
        read_needs(config_for(model, "float32", algorithm={"kind": "grpo", **keys}), on_gpu=True)
        for keys in ({}, {"kl": 0.1}, {"kl": 0.1, "reference": "replica"})
    )
    assert copy.trainer.device_bytes == plain.trainer.device_bytes + 4 * PARAMETERS
    assert apart.trainer == plain.trainer
    assert apart.reference == MemoryNeed(4 * PARAMETERS, 0) and copy.reference == MemoryNeed(0, 0)


def test_ranks_divide_what_the_trainer_keeps_and_computes(model: Path) -> None:
    alone, four = (
        read_needs(config_for(model, "float32", trainer=ranks), on_gpu=True)
        for ranks in ({}, {"shard": 2, "sequence": 2})
    )
    assert four.trainer.device_bytes == alone.trainer.device_bytes // 4
    assert four.trainer.host_bytes == alone.trainer.host_bytes  # what is published is one version
    assert four.activation_memory.micro_batch_tokens == alone.activation_memory.micro_batch_tokens // 2


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "trainer", "replica"),
    [
        ("float32", False, MemoryNeed(0, 16 * PARAMETERS), MemoryNeed(0, 12 * PARAMETERS + 512 * KV)),
        (
            "float32",
            True,
            MemoryNeed(16 * PARAMETERS, 0),
            MemoryNeed(8 * PARAMETERS + 512 * KV, 4 * LARGEST),
        ),
        (
            "bfloat16",
            True,
            MemoryNeed(20 * PARAMETERS, 4 * PARAMETERS),
            MemoryNeed(4 * PARAMETERS + 256 * KV, 2 * LARGEST),
        ),
    ],
)
def test_device_and_host_are_counted_apart(
    model: Path, dtype: str, on_gpu: bool, trainer: MemoryNeed, replica: MemoryNeed
) -> None:
    needs = read_needs(config_for(model, dtype), on_gpu=on_gpu)
    assert (needs.trainer, needs.replica) == (trainer, replica)


@pytest.mark.parametrize(
    ("fast", "trainer", "replica"),
    [
        (True, 26 * PARAMETERS, 6 * PARAMETERS + 4 * (LARGEST // 32) * 32 + 512 * KV),
        (False, 26 * PARAMETERS, 14 * PARAMETERS + 2 * LARGEST + 512 * KV),
    ],
)
def test_bfloat16_needs_more_on_a_cpu_that_computes_it_in_float32(
    model: Path, fast: bool, trainer: int, replica: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_format, "multiplies_bfloat16", lambda: fast)
    needs = read_needs(config_for(model, "bfloat16"), on_gpu=False)
    assert (needs.trainer, needs.replica) == (MemoryNeed(0, trainer), MemoryNeed(0, replica))
    assert needs.weights_bytes == 2 * PARAMETERS


@pytest.mark.parametrize(
    ("limit", "flags", "fast"),
    [
        ("", "avx512f avx512_bf16", True),
        ("", "avx2 amx_bf16", True),
        ("", "avx2 avx512f", False),
        ("avx2", "avx512f avx512_bf16", False),
    ],
)
def test_bfloat16_is_computed_where_the_cpu_multiplies_it_and_torch_may(
    limit: str, flags: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    if limit:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    monkeypatch.setattr(number_format, "cpu_flags", lambda: set(flags.split()))
    assert number_format.multiplies_bfloat16() == fast
    assert number_format.computing_dtype("bfloat16", on_gpu=True) == "bfloat16"
    assert number_format.computing_dtype("float32", on_gpu=False) == "float32"


def test_what_lies_in_a_layer_is_rounded_by_its_products(model: Path) -> None:
    save_file({"model.layers.0.x": np.zeros(40, np.float32)}, model / "model-3.safetensors")
    needs = read_needs(config_for(model, "bfloat16"), on_gpu=True)
    assert needs.trainer.device_bytes == 16 * (PARAMETERS + 40) + 4 * PARAMETERS
    layer_copies = 2 * 2 * 40  # of one layer, times the layers of the configuration
    copies = layer_copies + 2 * (LARGEST // 32) * 32  # and of the projection
    assert needs.activation_memory.layer.fixed_bytes == copies + MATRIX_GRADIENT


def test_ranks_put_a_layer_together_while_it_computes(model: Path) -> None:
    save_file({"model.layers.0.x": np.zeros(40, np.float32)}, model / "model-3.safetensors")
    both = read_needs(config_for(model, "float32", trainer={"shard": 2}), on_gpu=True)
    assert both.trainer.device_bytes == 8 * (PARAMETERS + 40)
    assert both.activation_memory.layer.fixed_bytes == (3 * 4 + 4) * 40 + TIED_PROJECTION
    in_tensor = read_needs(config_for(model, "float32", trainer={"tensor": 2}), on_gpu=True)
    assert in_tensor.activation_memory.layer.fixed_bytes == MATRIX_GRADIENT // 2


def test_an_offloaded_trainer_keeps_nothing_on_its_gpu_and_publishes_from_its_masters(model: Path) -> None:
    save_file({"model.layers.0.x": np.zeros(40, np.float32)}, model / "model-3.safetensors")
    needs = read_needs(config_for(model, "float32", trainer={"offload": True}), on_gpu=True)
    assert needs.trainer == MemoryNeed(0, 16 * (PARAMETERS + 40))
    assert needs.activation_memory.layer.fixed_bytes == (3 * 4 + 4) * 40 + TIED_PROJECTION
    rounded = read_needs(config_for(model, "bfloat16", trainer={"offload": True}), on_gpu=True)
    assert rounded.trainer == MemoryNeed(0, 18 * (PARAMETERS + 40) + 8 * PARAMETERS)


def test_8_bit_moments_take_a_quarter_and_on_a_cpu_an_update_takes_more(model: Path) -> None:
    eight = config_for(model, "float32", optimizer={"states": "8bit"})
    needs = read_needs(eight, on_gpu=True)
    assert needs.trainer.device_bytes == 8 * PARAMETERS + int(2.03125 * PARAMETERS)
    assert needs.checkpoint_bytes == 4 * PARAMETERS + int(2.03125 * PARAMETERS)
    assert needs.activation_memory.update_bytes == 0
    assert read_needs(eight, on_gpu=False).activation_memory.update_bytes == 56 * LARGEST


def test_a_reference_model_is_counted(model: Path) -> None:
    config = config_for(model, "float32", algorithm={"kind": "grpo", "kl": 0.1})
    assert read_needs(config, on_gpu=True).trainer.device_bytes == 20 * PARAMETERS


def test_a_broken_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        tensor_elements(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="is not a safetensors file"):
        tensor_elements(tmp_path)
    with pytest.raises(DataError, match="has no 'num_attention_heads'"):
        kv_token_bytes({}, 4)


def test_a_kernel_that_does_not_describe_its_cpus_has_none_with_bfloat16(monkeypatch, tmp_path):
    monkeypatch.setattr(number_format, "CPUS", tmp_path / "cpuinfo")
    assert (number_format.cpu_flags(), number_format.cpu_model()) == (set(), "")
    assert not number_format.multiplies_bfloat16()
