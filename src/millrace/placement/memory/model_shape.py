"""The dimensions of a model, on which every estimate goes: from its `config.json` and its tensors."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import DataError
from millrace.core.supported import NORMS_AFTER, SINKS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "bf16": 2, "fp8": 1}
"""Of a number. The simulator writes bf16."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model, and numbers of weights: of the largest layer, outside layers, of the largest
    tensor. `routed`: experts of a token. `composed`: no fused kernel computes attention.
    `clamped`: experts' gates are gpt-oss's."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_dim: int
    layer_weights: int = 0
    other_weights: int = 0
    largest_weight: int = 0
    routed: int = 0
    norms_after: bool = False
    composed: bool = False
    clamped: bool = False

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_weights + self.other_weights

    @property
    def projection(self) -> int:
        """Weights of the output projection."""
        return self.vocabulary * self.hidden

    @property
    def head_weights(self) -> int:
        """Of an output projection that is not the embedding."""
        return self.projection if self.other_weights >= 2 * self.projection else 0


def shape_of(model: dict[str, Any], tensors: dict[str, int]) -> Shape:
    """The shape of a model. If `model` has no vocabulary, the largest tensor counts as the embedding."""
    layers, largest = Counter[str](), max(tensors.values(), default=0)
    for name, elements in tensors.items():
        layers["".join(re.findall(r"\.layers\.\d+\.", name))] += elements
    other = layers.pop("", 0)
    heads, hidden = _count(model, "num_attention_heads"), _count(model, "hidden_size")
    routed = model.get("num_experts_per_tok") or 0
    clamped = model.get("model_type") == "gpt_oss"  # `intermediate_size` is of one expert
    return Shape(
        layers=_count(model, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_count(model, "intermediate_size", 4 * hidden) * (routed if clamped else 1),
        vocabulary=_count(model, "vocab_size", max(1, largest // hidden)),
        query_heads=heads,
        kv_heads=_count(model, "num_key_value_heads", heads),
        head_dim=_count(model, "head_dim", hidden // heads),
        layer_weights=max(layers.values(), default=0),
        other_weights=other,
        largest_weight=largest,
        routed=routed,
        norms_after=model.get("model_type") in NORMS_AFTER,
        clamped=clamped,
        composed=bool(model.get("attn_logit_softcapping")) or model.get("model_type") in SINKS,
    )


def _count(model: dict[str, Any], key: str, default: int | None = None) -> int:
    count = model.get(key) or default
    if count is None:
        raise DataError(f"the model's config.json has no {key!r}: is it a decoder model?")
    if type(count) is not int or count < 1:
        raise DataError(
            f"the model's config.json has {count!r} as {key!r}: it must be a whole number above 0"
        )
    return count


def kv_bytes(layers: int, kv_width: int, size: int) -> int:
    """Keys and values of one token in all layers. `kv_width`: of the key heads of a layer together."""
    return 2 * layers * kv_width * size


def kv_token_bytes(model: dict[str, Any], size: int, num_devices: int = 1) -> int:
    """Of one token, on one of `num_devices` devices. Raises: DataError: `model` is not of a decoder."""
    shape = shape_of(model, {})
    return kv_bytes(shape.layers, max(1, shape.kv_heads // num_devices) * shape.head_dim, size)
