"""Sizes of models for the cost model: parameters, active parameters, KV bytes, from a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError, DataError, boundary
from millrace.placement.memory import engine_memory
from millrace.placement.memory.model_shape import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A decoder-only transformer with gated MLPs. `active_parameters`: parameters that act on one token."""

    name: str
    parameters: int
    active_parameters: int
    layers: int
    hidden: int
    query_width: int  # attention heads x head dimension
    kv_width: int  # key-value heads x head dimension
    routed_fraction: float = 1.0  # of a layer's experts that one token visits; 1: a dense model
    source: str = ""

    def weights_bytes(self, dtype: str = "bf16") -> int:
        return engine_memory.weights_bytes(self.parameters, dtype)

    def kv_token_bytes(self, dtype: str = "bf16") -> int:
        """Keys and values of one token in all layers."""
        return engine_memory.kv_token_bytes(self.layers, self.kv_width, dtype)

    def read_bytes(self, tokens: int, dtype: str = "bf16") -> float:
        """Bytes of weights that a forward pass over `tokens` tokens reads. Of the experts, only those that a
        token visits count (routing is taken as uniform)."""
        idle = 0.0
        if self.routed_fraction < 1.0:
            experts = (self.parameters - self.active_parameters) / (1.0 - self.routed_fraction)
            idle = experts * (1.0 - self.routed_fraction) ** tokens
        return (self.parameters - idle) * DTYPE_BYTES[dtype]

    def attention_flops(self, context: float) -> float:
        """Work of one token's forward pass: scores and their product with values, over `context` tokens."""
        return 4.0 * self.layers * self.query_width * context


def from_hf_config(config: Mapping[str, Any], name: str = "model", source: str = "") -> ModelSizes:
    """Count parameters from `config.json` (Llama, Qwen2/3, Mixtral and Qwen-MoE families; no biases or norms,
    which are below 0.1 %).

    Raises: DataError: a key is missing.
    """
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
        experts, routed = _experts(config)
        expert = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
        vocabulary = int(config["vocab_size"]) * hidden
    except KeyError as error:
        raise DataError(f"{name}: config.json has no {error}: is it a decoder model?") from None
    query_width = heads * head_dim
    attention = 2 * hidden * (query_width + kv_width)
    shared = 3 * hidden * int(config.get("shared_expert_intermediate_size") or 0)
    router = hidden * experts if experts > 1 else 0
    tied = bool(config.get("tie_word_embeddings"))
    stack = layers * (attention + experts * expert + shared + router) + vocabulary * (1 if tied else 2)
    active = layers * (attention + routed * expert + shared + router) + vocabulary
    fraction = routed / experts
    return ModelSizes(name, stack, active, layers, hidden, query_width, kv_width, fraction, source)


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """(experts of a layer, those one token visits); a dense layer is one expert."""
    count = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    return (int(count), int(config["num_experts_per_tok"])) if count else (1, 1)


def _named(
    name: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    intermediate: int,
    vocabulary: int,
    **more: Any,
) -> ModelSizes:
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        **more,
    }
    return from_hf_config(config, name, source=f"config.json of {name} on the Hugging Face hub")


_ALL = (
    _named("Qwen2.5-1.5B", 28, 1536, (12, 2), 8960, 151_936, tie_word_embeddings=True),
    _named("Qwen2.5-7B", 28, 3584, (28, 4), 18_944, 152_064),
    _named("Qwen2.5-14B", 48, 5120, (40, 8), 13_824, 152_064),
    _named("Qwen2.5-32B", 64, 5120, (40, 8), 27_648, 152_064),
    _named("Qwen2.5-72B", 80, 8192, (64, 8), 29_568, 152_064),
    _named("Qwen3-8B", 36, 4096, (32, 8), 12_288, 151_936, head_dim=128),
    _named("Llama-3.1-8B", 32, 4096, (32, 8), 14_336, 128_256),
    _named("Llama-3.1-70B", 80, 8192, (64, 8), 28_672, 128_256),
    _named("Llama-3.1-405B", 126, 16_384, (128, 8), 53_248, 128_256),
    _named(
        "Qwen3-30B-A3B",
        48,
        2048,
        (32, 4),
        6144,
        151_936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
)

MODELS = {entry.name: entry for entry in _ALL}


def model(name: str) -> ModelSizes:
    """A model of the table, or of a directory with a Hugging Face `config.json`.

    Raises: ConfigError: `name` is neither. DataError: the file is not such a configuration.
    """
    path = Path(name) / "config.json"
    if path.exists():
        with boundary("cost model", f"read {path}", DataError):
            config = json.loads(path.read_text(encoding="utf-8"))
        return from_hf_config(config, Path(name).name, str(path))
    if name not in MODELS:
        raise ConfigError(
            f"no model is called {name!r}; known: {', '.join(MODELS)}; or name a directory with a config.json"
        )
    return MODELS[name]
