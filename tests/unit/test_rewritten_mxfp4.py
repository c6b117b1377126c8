"""mxfp4 weights in bfloat16 are those that transformers reads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_doubles import save_tiny_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace.cli.app import run
from millrace.core.errors import DataError
from millrace.trainer.files import rewritten
from millrace.trainer.files.rewritten import dequantize, dequantized
from millrace.trainer.model import load_model

CPU = torch.device("cpu")


def random_packed(experts, outputs, groups, seed=0):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, outputs, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 150, (experts, outputs, groups), generator=generator, dtype=torch.uint8)
    return blocks, scales


def save_quantized(directory):
    """A model as gpt-oss is published: blocks and scales in place of the experts' matrices, in two files.
    Returns the matrices."""
    save_tiny_model(directory, "gpt_oss", hidden_size=32, intermediate_size=64)
    tensors, matrices = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_packed(experts, outputs, inputs // 32)
        scales = scales.clamp(120, 126)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        matrices[name] = convert_moe_packed_tensors(blocks, scales)
    (directory / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scales")}
    files = {"model-00001.safetensors": first, "model-00002.safetensors": tensors.keys() - first.keys()}
    places = {name: file for file, names in files.items() for name in names}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return matrices


def test_every_number_is_that_of_transformers():
    blocks, scales = random_packed(3, 6, 4)
    expected = convert_moe_packed_tensors(blocks, scales)
    found = dequantized(blocks, scales)
    assert found.dtype == torch.bfloat16 and found.shape == (3, 128, 6)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("file_bytes", [1, rewritten.FILE_BYTES])
def test_a_dequantized_model_is_trained(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(rewritten, "FILE_BYTES", file_bytes)
    matrices = save_quantized(tmp_path / "model")
    with pytest.raises(DataError, match=r"has mxfp4 weights\. `millrace dequantize MODEL DIRECTORY`"):
        load_model(tmp_path / "model", CPU)
    assert run(["dequantize", str(tmp_path / "model"), str(tmp_path / "out")]) == 0
    weights = dict(load_model(tmp_path / "out", CPU).named_parameters())
    assert matrices
    for name, matrix in matrices.items():
        assert torch.equal(weights[name], matrix.float())


def test_what_is_not_mxfp4_or_is_damaged_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"has no mxfp4 weights: its config.json says None"):
        dequantize(save_tiny_model(tmp_path / "plain"), tmp_path / "out")
    save_quantized(tmp_path / "model")
    (tmp_path / "model" / "model-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-00002.safetensors"):
        dequantize(tmp_path / "model", tmp_path / "out")
    blocks, scales = random_packed(1, 2, 1)
    scales[0, 1, 0] = 255
    with pytest.raises(DataError, match="a scale of the mxfp4 weights is not a number"):
        dequantized(blocks, scales)
    assert not (tmp_path / "out").exists()
