"""The decoder's forward pass over rows of tokens: one scan over its stacked layers. Attention in a row of
prefix trees takes a block of queries at a time. Values have names, which outside of a `watching` block
trace to nothing.

**Attention.** A row is the preorder of a tree of tokens: each sequence adds the tokens that it does not share
with the one before. So token j comes before token i in a sequence exactly if j <= i < end_j, where end_j is
the first position behind all that follows j. One number a token says who sees whom.

Shape suffixes: R rows, T tokens of a row, M hidden size, H query heads, K key heads, G = H / K, D numbers of
a head, Q queries of a block, B blocks. A block has every B-th query, so that each device has a part of each
block where the tokens of a row are divided among devices. Each device has the keys and values of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace.devices.low_rank import DOWN, UP
from millrace_jax.adapted_matmul import adapted_matmul
from millrace_jax.decoder import Decoder
from millrace_jax.devices import splash
from millrace_jax.devices.mesh import ROWS, divided, gathered, kept, size_of
from millrace_jax.row_arrays import RowArrays
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


# ---------------------------------------------------------------- attention


BLOCK = 512
"""Queries whose scores are in the memory of a device at once."""
SCORES = 1 << 20
"""Scores of a head and a row that are in the memory of a device at once, where tokens see near ones only."""


def attention(
    q_RTHD: Array,
    k_RTKD: Array,
    v_RTKD: Array,
    ends_RT: Array,
    positions_RT: Array,
    window: Array,
    *,
    band: int = 0,
    scale: float,
    cap: float | None,
) -> Array:
    """(R, T, H, D) in the type of `q_RTHD`. Scores and their softmax are at least float32.

    `ends_RT`: end_j of each token. `positions_RT`: positions in the sequences. `window`: a token sees keys
    less than so many positions away. `band`: see `RowArrays`."""
    if splash.serves(q_RTHD):
        return splash.attention(q_RTHD, k_RTKD, v_RTKD, ends_RT, positions_RT, window, scale=scale, cap=cap)
    kv_heads = k_RTKD.shape[2]
    q = q_RTHD.reshape(*q_RTHD.shape[:2], kv_heads, -1, q_RTHD.shape[3])
    k, v = (divided(x, ROWS, None, "tensor") for x in (k_RTKD, v_RTKD))
    places = jnp.broadcast_to(jnp.arange(q.shape[1]), ends_RT.shape)
    tokens = Seen(places, divided(positions_RT, ROWS), divided(ends_RT, ROWS))
    one = partial(_block, window=window, scale=scale, cap=cap)
    if band and size_of("sequence") == 1:
        return _banded(one, q, k, v, tokens, band).reshape(q_RTHD.shape)
    return _dense(one, q, k, v, tokens).reshape(q_RTHD.shape)


class Seen(NamedTuple):
    """Who sees whom, (R, T) each: positions in the row, positions in the sequences, and ends."""

    places: Array
    positions: Array
    ends: Array


def _dense(one: Callable[..., Array], q: Array, k: Array, v: Array, tokens: Seen) -> Array:
    """Each query has the keys of all tokens."""
    rows, count = q.shape[:2]
    block = math.gcd(BLOCK * size_of("sequence"), count)
    if block == count:
        return one(q, tokens, k, v, tokens)

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, block, -1, *x.shape[2:]), 2, 0)

    of_block = jax.checkpoint(lambda each: one(*each, k, v, tokens))
    out = jax.lax.map(of_block, (blocks(q), Seen(*map(blocks, tokens))))
    return jnp.moveaxis(out, 0, 2)


def _banded(one: Callable[..., Array], q: Array, k: Array, v: Array, tokens: Seen, band: int) -> Array:
    """Each block of queries has the keys of the 2 x `band` tokens before it, and its own."""
    block = min(band, BLOCK)
    before = 2 * band // block

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    def near(x: Array) -> Array:
        own = blocks(x)
        padded = jnp.concatenate([jnp.zeros_like(own, shape=(before, *own.shape[1:])), own])
        return jnp.concatenate([padded[i : i + len(own)] for i in range(before + 1)], axis=2)

    def parts(q: Array, k: Array, v: Array, tokens: Seen) -> tuple[Any, ...]:
        return blocks(q), Seen(*map(blocks, tokens)), near(k), near(v), Seen(*map(near, tokens))

    together = max(1, SCORES // (block * (2 * band + block)))
    if q.shape[1] <= together * block:
        out = jax.vmap(one)(*parts(q, k, v, tokens))
    else:
        of_block = jax.checkpoint(lambda each: one(*each))
        mapped = jax.checkpoint(lambda *x: jax.lax.map(of_block, parts(*x), batch_size=together))
        out = mapped(q, k, v, tokens)  # the gradient needs no copies of the keys
    return jnp.moveaxis(out, 0, 1)


def _block(
    q_RQKGD: Array,
    queries: Seen,
    k_RTKD: Array,
    v_RTKD: Array,
    keys: Seen,
    *,
    window: Array,
    scale: float,
    cap: float | None,
) -> Array:
    """The queries' sums of values. A key whose end is 0 is padding."""
    wide = jnp.promote_types(q_RQKGD.dtype, jnp.float32)
    z = jnp.einsum("rqkgd,rtkd->rkgqt", q_RQKGD, k_RTKD, preferred_element_type=wide) * scale
    if cap is not None:
        z = jnp.tanh(z / cap) * cap
    place, position, _ = (x[:, :, None] for x in queries)
    before, of_key, end = (x[:, None] for x in keys)
    seen = (before <= place) & (place < end) & (position - of_key < window)
    z = jnp.where(seen[:, None, None], z, jnp.finfo(wide).min)
    weights = jnp.exp(z - jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True)))
    out = jnp.einsum("rkgqt,rtkd->rqkgd", weights.astype(q_RQKGD.dtype), v_RTKD, preferred_element_type=wide)
    total = jnp.moveaxis(jnp.sum(weights, axis=-1), 3, 1)  # fewer numbers are divided than weights
    return (out / total[..., None]).astype(q_RQKGD.dtype)


# ---------------------------------------------------------------- names of values


_VALUES: ContextVar[dict[str, Any] | None] = ContextVar("values", default=None)


def watched(name: str, x: Any) -> Any:
    """`x`, which a `watching` block gets under its name."""
    values = _VALUES.get()
    if values is not None:
        values[name] = x
    return x


@contextmanager
def watching() -> Iterator[dict[str, Any]]:
    """What is traced in the block, by name. A program must return these arrays."""
    values: dict[str, Any] = {}
    token = _VALUES.set(values)
    try:
        yield values
    finally:
        _VALUES.reset(token)


@contextmanager
def watching_turn() -> Iterator[dict[str, Any]]:
    """In a turn of a loop: what the turn must return, because its arrays end with it. Nothing where nobody
    watches."""
    if _VALUES.get() is None:
        yield {}
        return
    with watching() as values:
        yield values
