"""The digest of `core.multilinear` as a program in JAX computes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.core.digest import MULTILINEAR
from millrace.core.multilinear import BLOCK_BYTES, KEYS, WORDS, block_sums, finished


def digest(jax: Any, data: np.ndarray) -> str:
    """`jax`: the module. Of bytes, on its first device."""
    padded = np.zeros(-(-len(data) // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
    padded[: len(data)] = data
    with _wide(jax):
        words = jax.lax.bitcast_convert_type(jax.numpy.asarray(padded).reshape(-1, WORDS, 8), jax.numpy.int64)
        sums = jax.numpy.stack(jax.jit(block_sums)(words, jax.numpy.asarray(KEYS.view(np.int64))), axis=1)
        return MULTILINEAR + finished(np.ascontiguousarray(sums), len(data))


def _wide(jax: Any) -> Any:
    """Integers of 64 bits, under the name that this JAX has for them."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)
