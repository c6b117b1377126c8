"""Attention in a row of prefix trees, a block of queries at a time.

A row is the preorder of a tree of tokens: each sequence adds the tokens that it does not share with the one
before. So token j comes before token i in a sequence exactly if j <= i < end_j, where end_j is the first
position behind all that follows j. One number a token says who sees whom.

Shape suffixes: R rows, T tokens of a row, H query heads, K key heads, G = H / K, D numbers of a head,
Q queries of a block, B blocks. A block has every B-th query, so that each device has a part of each block
where the tokens of a row are divided among devices. Each device has the keys and values of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace_jax.devices import splash
from millrace_jax.devices.mesh import ROWS, divided, size_of

Array = Any
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
