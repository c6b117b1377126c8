"""An adapter as files of peft, which loads the adapter beside its base model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from millrace.adapters.low_rank import lengths
from millrace.config.tables.training import Adapter
from millrace.trainer.adapters.adapted_linear import adapted_layers

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."


def peft_tensors(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The adapter's tensors in `dtype`, under peft's names. DoRA's magnitude is in float32, because rounding
    it would change every row."""
    tensors = {}
    for name, layer in adapted_layers(model).items():
        for matrix in ("lora_A", "lora_B"):
            tensors[f"{PREFIX}{name}.{matrix}.weight"] = getattr(layer, matrix).detach().to("cpu", dtype)
        if layer.lora_magnitude is not None:
            magnitude = lengths(layer.weight, layer.lora_magnitude).detach()
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = magnitude.to("cpu")
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def peft_config(model: PreTrainedModel, adapter: Adapter, model_path: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(model)}),
        "use_dora": adapter.kind == "dora",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
