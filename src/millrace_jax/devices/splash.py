"""Splash attention, JAX's kernel for TPUs, for rows of prefix trees. No TPU has run it: see docs/jax.md.

The kernel's masks that are functions of two positions, and its segment ids, cannot say who sees whom in a
tree. So it gets the mask as an array, which is made on the device, one row at a time. It skips blocks of the
mask in which nobody sees anybody. The mask has T x T bytes. It is made anew for the gradient, and not kept.

Shape suffixes: R rows, T tokens, H query heads, K key heads, D numbers of a head.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from millrace_jax.devices.mesh import ROWS, size_of

Array = Any
LANES = 128
"""The kernel's blocks, and the numbers of a head, are multiples of this."""
BLOCK = 512
VARIABLE = "MILLRACE_JAX_ATTENTION"
"""Of the environment. With the value "plain" the kernel is not taken: no TPU has compiled it yet."""


def serves(q_RTHD: Array) -> bool:
    """Whether `attention` is for this device and these shapes."""
    _, tokens, _, size = q_RTHD.shape
    whole = tokens % LANES == 0 and size % LANES == 0 and size_of("sequence") == 1
    return whole and jax.default_backend() == "tpu" and os.environ.get(VARIABLE) != "plain"


def attention(
    q_RTHD: Array,
    k_RTKD: Array,
    v_RTKD: Array,
    ends_RT: Array,
    positions_RT: Array,
    window: Array,
    *,
    scale: float,
    cap: float | None,
    interpret: bool = False,
) -> Array:
    """(R, T, H, D): see `forward.attention`. `interpret`: compute the kernel's steps on any device."""
    rows = partial(_rows, scale=scale, cap=cap, interpret=interpret)
    if not jax.sharding.get_abstract_mesh().empty:
        heads, each = PartitionSpec(ROWS, None, "tensor"), PartitionSpec(ROWS)
        specs = (heads, heads, heads, each, each, PartitionSpec())
        rows = jax.shard_map(rows, in_specs=specs, out_specs=heads, check_vma=False)
    return rows(q_RTHD, k_RTKD, v_RTKD, ends_RT, positions_RT, window)


def _rows(
    q: Array, k: Array, v: Array, ends: Array, positions: Array, window: Array, **options: Any
) -> Array:
    def one(row: tuple[Array, ...]) -> Array:
        q_THD, k_TKD, v_TKD, ends_T, positions_T = row
        return _row(q_THD, k_TKD, v_TKD, ends_T, positions_T, window, **options)

    return jax.lax.map(jax.checkpoint(one), (q, k, v, ends, positions))


def _row(
    q_THD: Array,
    k_TKD: Array,
    v_TKD: Array,
    ends_T: Array,
    positions_T: Array,
    window: Array,
    *,
    scale: float,
    cap: float | None,
    interpret: bool,
) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    block = math.gcd(BLOCK, q_THD.shape[0])
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        _mask(ends_T, positions_T, window)[None],
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        attn_logits_soft_cap=cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):  # tracing made arrays of these flags
        setattr(kernel, name, getattr(kernel, name)._replace(is_dynamic_mask=True))
    heads = (jnp.swapaxes(x, 0, 1) for x in (q_THD * scale, k_TKD, v_TKD))
    return jnp.swapaxes(kernel(*heads), 0, 1)


def _mask(ends_T: Array, positions_T: Array, window: Array) -> Array:
    """(T, T): whether a query, the first index, sees a key."""
    places = jnp.arange(len(ends_T))
    before = (places <= places[:, None]) & (places[:, None] < ends_T)
    return before & (positions_T[:, None] - positions_T < window)
