"""The tensors of an adapter as peft reads them, which loads the adapter beside its base model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from millrace.adapters.low_rank import lengths
from millrace.trainer.adapters.adapted_linear import adapted_layers
from millrace.trainer.adapters.peft_config import PREFIX


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
