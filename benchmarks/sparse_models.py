"""Model directories of real sizes, whose weights are holes in a file. Readers of headers need no more."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
"""Of Qwen2.5, as keys of its configuration. 70b is its 72B."""


def sparse_model(directory: Path, shape: Mapping[str, Any]) -> Path:
    """`directory` as that of a Qwen2 model of this shape."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", **shape}))
    header, end = {}, 0
    for name, sizes in tensors(shape):
        begin, end = end, end + 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


def tensors(shape: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    yield "model.embed_tokens.weight", [vocabulary, hidden]
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, outputs in (("q", hidden), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{name}_proj.weight", [outputs, hidden]
            yield f"{prefix}.self_attn.{name}_proj.bias", [outputs]
        yield f"{prefix}.self_attn.o_proj.weight", [hidden, hidden]
        yield f"{prefix}.mlp.gate_proj.weight", [inner, hidden]
        yield f"{prefix}.mlp.up_proj.weight", [inner, hidden]
        yield f"{prefix}.mlp.down_proj.weight", [hidden, inner]
        yield f"{prefix}.input_layernorm.weight", [hidden]
        yield f"{prefix}.post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", [vocabulary, hidden]
