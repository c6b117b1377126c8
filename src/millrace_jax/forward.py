"""The decoder's forward pass over rows of tokens: one scan over its stacked layers.

Shape suffixes: R rows, T tokens of a row, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from millrace.devices.low_rank import DOWN, UP
from millrace_jax.adapted_matmul import adapted_matmul
from millrace_jax.decoder import Decoder
from millrace_jax.devices.mesh import ROWS, divided, gathered, kept, size_of
from millrace_jax.row_arrays import RowArrays
from millrace_jax.seam import watched, watching_turn
from millrace_jax.tree_attention import attention
from millrace_jax.weights import EMBEDDING, LAYERS, NORM, Tree

Array = Any
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Activations by their names in transformers."""
TOKENS = ROWS, "sequence"
"""The axes of (R, T, ...)."""
UNROLLED = 4
"""Layers in one turn of the loop. Several are computed faster than one, and take longer to compile."""


def hidden_states(weights: Tree, shape: Decoder, rows: RowArrays, *, recompute: bool) -> Array:
    """Final hidden states (R, T, M), in the type of the weights. `recompute`: only each layer's input is kept
    for the gradient."""
    embedding = gathered(EMBEDDING, weights[EMBEDDING])
    tokens_RT, positions_RT = divided(rows.tokens_RT, ROWS, "sequence"), rows.positions_RT
    x = embedding[tokens_RT] * jnp.asarray(shape.embedding_scale, embedding.dtype)
    if shape.padding is not None:
        x = jnp.where((tokens_RT == shape.padding)[..., None], jax.lax.stop_gradient(x), x)
    watched("embedding", x)
    turns = [_turn(rope.inverse, rope.factor, positions_RT, x.dtype) for rope in shape.ropes]
    cos, sin = (jnp.stack(tables) for tables in zip(*turns, strict=True))

    def layer(x: Array, of_layer: tuple[Tree, Array, Array]) -> tuple[Array, Any]:
        tensors, window, rope = of_layer
        tensors = {name: gathered(name, tensor) for name, tensor in tensors.items()}
        seen = partial(
            attention, ends_RT=rows.ends_RT, positions_RT=positions_RT, window=window, band=rows.band
        )
        with watching_turn() as values:
            return _layer(x, tensors, shape, (cos[rope], sin[rope]), seen), values

    if recompute:
        layer = jax.checkpoint(layer)
    elif size_of("fsdp") > 1:
        layer = jax.checkpoint(layer, policy=kept)
    scanned = weights[LAYERS], jnp.asarray(shape.windows_L), jnp.asarray(shape.rope_L)
    unroll = UNROLLED if size_of("fsdp") == 1 else 1
    x, of_layers = jax.lax.scan(layer, divided(x, *TOKENS), scanned, unroll=unroll)
    watched(LAYERS, of_layers)
    return watched("norm", _norm(x, weights[NORM], shape))


def _layer(x: Array, tensors: Tree, shape: Decoder, turn: Any, attention: Callable[..., Array]) -> Array:
    linear = partial(_linear, tensors, shape)
    rows, tokens, _ = x.shape

    def heads(name: str) -> Array:
        projected = linear(f"self_attn.{name}_proj", normed).reshape(rows, tokens, -1, shape.head_dim)
        return watched(name, divided(projected, *TOKENS, "tensor"))

    normed = watched("input_norm", _norm(x, tensors["input_layernorm.weight"], shape))
    q, k, v = (heads(name) for name in "qkv")
    if "self_attn.q_norm.weight" in tensors:
        q, k = (
            watched(f"{name}_norm", _norm(each, tensors[f"self_attn.{name}_norm.weight"], shape))
            for name, each in (("q", q), ("k", k))
        )
    q, k = watched("q_rope", _rotated(q, *turn)), watched("k_rope", _rotated(k, *turn))
    attended = attention(q, k, v, scale=shape.scale, cap=shape.cap).reshape(rows, tokens, -1)
    out = watched("o", linear("self_attn.o_proj", watched("attention", attended)))
    if shape.norms_after:
        out = watched("o_norm", _norm(out, tensors["post_attention_layernorm.weight"], shape))
    x = watched("residual", divided(x + out, *TOKENS))
    before = "pre_feedforward_layernorm" if shape.norms_after else "post_attention_layernorm"
    normed = watched("mlp_norm", _norm(x, tensors[f"{before}.weight"], shape))
    gated = ACTIVATIONS[shape.activation](linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
    gated = watched("gated", divided(gated, *TOKENS, "tensor"))
    out = watched("down", linear("mlp.down_proj", gated))
    if shape.norms_after:
        out = watched("down_norm", _norm(out, tensors["post_feedforward_layernorm.weight"], shape))
    return watched("output", divided(x + out, *TOKENS))


def _linear(tensors: Tree, shape: Decoder, name: str, x: Array) -> Array:
    weight, down = tensors[f"{name}.weight"], tensors.get(f"{name}.{DOWN}")
    if down is None:
        out = jnp.einsum("...i,oi->...o", x, weight)
    else:
        out = adapted_matmul(x, weight, down, tensors[f"{name}.{UP}"], shape.merging)
    bias = tensors.get(f"{name}.bias")
    return out if bias is None else out + bias


def _norm(x: Array, weight: Array, shape: Decoder) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, at least in float32; `norm_from_one`: * (1 + weight)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    out = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + shape.eps)
    if shape.norm_from_one:
        return (out * (1 + weight.astype(out.dtype))).astype(x.dtype)
    return out.astype(x.dtype) * weight


def _turn(inverse: Array, factor: float, positions_RT: Array, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines, (R, T, D / 2) each."""
    angles = positions_RT[..., None].astype(jnp.float32) * jnp.asarray(inverse)
    return (jnp.cos(angles) * factor).astype(dtype), (jnp.sin(angles) * factor).astype(dtype)


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the two halves of each head's numbers, (R, T, heads, D)."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
