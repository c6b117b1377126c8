"""What the engine must know of a model: its dimensions, its parameters' names, its rotary tables.

Names, shapes and rotary frequencies are Hugging Face's own (a model on the meta device and its rotary
module), so that the engine cannot disagree with what a trainer publishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.core.errors import DataError, boundary
from millrace.core.supported import TORCH_ENGINE, refuse_unsupported


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama family. `shapes` maps parameter names, in state-dict order, to shapes."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    tied: bool
    shapes: dict[str, tuple[int, ...]]
    config: Any

    def rotary_tables(
        self, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each (num_positions, head_dim), from the family's own rotary module."""
        with torch.device("meta"):
            rotary_class = type(AutoModelForCausalLM.from_config(self.config).model.rotary_emb)
        positions = torch.arange(num_positions)[None]
        cos, sin = rotary_class(self.config)(torch.empty(0, dtype=dtype), positions)
        return cos[0].to(device), sin[0].to(device)


def read_architecture(model_path: str) -> Architecture:
    """Read `config.json` of a Hugging Face model directory.

    Raises: DataError for a directory without a configuration, or a model the engine cannot run.
    """
    with boundary(model_path, "no usable model configuration", DataError):
        config = AutoConfig.from_pretrained(model_path)
    with boundary(model_path, "its config.json is of no model that can be built", DataError):
        return architecture_of(config)


def architecture_of(config: Any) -> Architecture:
    """The architecture of a Hugging Face configuration. Raises: DataError if unsupported."""
    refuse_unsupported(config, TORCH_ENGINE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        shapes=shapes,
        config=config,
    )
