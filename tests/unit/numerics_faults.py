"""Faults to plant in the model of one side, while the reference has the honest model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from trainer_doubles import tiny_model

from millrace.conversations.tokenizer import make_character_tokenizer

HONEST = ["qwen3", "qwen2", "llama", "gemma3"]
TOKENS = torch.randint(2, 60, (33,), generator=torch.Generator().manual_seed(0)).tolist()


class Planted(NamedTuple):
    """`plant` changes the tree of config.json, and the tensors."""

    family: str
    plant: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
    layer: int
    operation: str


def swap(tensors: dict[str, torch.Tensor], *letters: str) -> None:
    first, second = (f"model.layers.1.self_attn.{letter}_proj.weight" for letter in letters)
    tensors[first], tensors[second] = tensors[second], tensors[first]


FAULTS = {
    "rope base": Planted("llama", lambda c, _: c["rope_parameters"].update(rope_theta=700.0), 0, "q_rope"),
    "norm eps": Planted("qwen3", lambda c, _: c.update(rms_norm_eps=1e-4), 0, "input_norm"),
    "q and k": Planted("llama", lambda _, t: swap(t, "q", "k"), 1, "q"),
    "scale": Planted("gemma3", lambda c, _: c.update(query_pre_attn_scalar=1), 0, "attention"),
    "bias": Planted("qwen2", lambda _, t: t["model.layers.1.self_attn.v_proj.bias"].add_(0.01), 1, "v"),
}


def honest_model(directory: Path, family: str) -> Path:
    """As many key heads as heads, so that their projections have one shape."""
    tiny_model(family, num_key_value_heads=4).save_pretrained(directory)
    make_character_tokenizer(directory, "0123456789")
    return directory


def faulty_model(honest: Path, fault: Planted) -> Path:
    """A copy with the fault."""
    directory = honest.with_name("faulty")
    shutil.copytree(honest, directory)
    config, weights = directory / "config.json", directory / "model.safetensors"
    tree, tensors = json.loads(config.read_text()), load_file(weights)
    fault.plant(tree, tensors)
    config.write_text(json.dumps(tree))
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory
