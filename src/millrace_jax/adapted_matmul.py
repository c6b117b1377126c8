"""A product with an adapted matrix. Its gradient is that of the thin matrices alone.

As in the trainer in torch, the merged matrix is rounded as replicas round it. Each product makes it anew.
Shape suffixes: O = outputs, I = inputs, R = rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any


class MergeRule(NamedTuple):
    """How an adapter becomes a part of a matrix. `published`: the dtype that the matrix is rounded to."""

    scale: float
    published: Any

    def merged(self, weight_OI: Array, down_RI: Array, up_OR: Array, dtype: Any) -> Array:
        """See `low_rank.adapted`. Replicas merge in float32."""
        wide = jnp.promote_types(up_OR.dtype, jnp.float32)
        product_OI = jnp.matmul(up_OR, down_RI, precision=jax.lax.Precision.HIGHEST)
        return (weight_OI.astype(wide) + self.scale * product_OI).astype(self.published).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapted_matmul(x: Array, weight_OI: Array, down_RI: Array, up_OR: Array, merging: MergeRule) -> Array:
    """x W'^T, (..., O), in the type of `x`. G is its gradient:

    dx = G W'    dB = scale G^T (x A^T)    dA = scale (G B)^T x

    `weight_OI` is frozen: its gradient is 0."""
    return jnp.einsum("...i,oi->...o", x, merging.merged(weight_OI, down_RI, up_OR, x.dtype))


def _forward(
    x: Array, weight_OI: Array, down_RI: Array, up_OR: Array, merging: MergeRule
) -> tuple[Array, tuple[Array, ...]]:
    return adapted_matmul(x, weight_OI, down_RI, up_OR, merging), (x, weight_OI, down_RI, up_OR)


def _backward(merging: MergeRule, kept: tuple[Array, ...], grad: Array) -> tuple[Array, ...]:
    x, weight_OI, down_RI, up_OR = kept
    down, up = down_RI.astype(grad.dtype), up_OR.astype(grad.dtype)
    of_x = jnp.einsum("...o,oi->...i", grad, merging.merged(weight_OI, down_RI, up_OR, x.dtype))
    of_down = jnp.einsum("...r,...i->ri", jnp.einsum("...o,or->...r", grad, up), x)
    of_up = jnp.einsum("...o,...r->or", grad, jnp.einsum("...i,ri->...r", x, down))
    thin = ((merging.scale * each).astype(up_OR.dtype) for each in (of_down, of_up))
    return of_x, jnp.zeros_like(weight_OI), *thin


adapted_matmul.defvjp(_forward, _backward)
