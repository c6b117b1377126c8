"""Log-probs of target tokens, with only a chunk of the logits in memory at a time.

A chunk has every so many-th token, so that each device has a part of each chunk. Shape suffixes: R rows,
N tokens of a row, M hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from millrace_jax.devices.mesh import AXES, ROWS, divided, size_of
from millrace_jax.mask_arrays import MaskArrays, cut_off

Array = Any
CHUNK_LOGITS = 1 << 24
"""Logits that a device computes at once: 64 MiB in float32."""


def token_logprobs(
    hidden_RNM: Array,
    weight_VM: Array,
    targets_RN: Array,
    *,
    temperature: float,
    softcap: float | None,
    masks: MaskArrays | None = None,
) -> tuple[Array, Array]:
    """Log-probs of `targets_RN` under softmax(logits / temperature), and that softmax's entropy: (R, N) each,
    at least float32, in nats. With `masks` the softmax is over a token's allowed tokens.

        logits = z | softcap * tanh(z / softcap),   z = hidden weight^T

    Degenerate: N no larger than a chunk -> one chunk, whose logits are kept for the gradient."""
    rows, tokens, size = hidden_RNM.shape
    chunk = chunk_tokens(rows, tokens, weight_VM.shape[0])
    chunks = tokens // chunk

    def of_chunk(hidden: Array, targets: Array, index: Array) -> tuple[Array, Array]:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        logits = jnp.einsum("rnm,vm->rnv", hidden, weight_VM, preferred_element_type=wide)
        if softcap is not None:
            logits = jnp.tanh(logits / softcap) * softcap
        logits = logits / temperature
        if masks is not None:
            logits = cut_off(logits, masks, index, chunks)
        logits = divided(logits, ROWS, "sequence", "tensor")
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        here = jnp.arange(logits.shape[-1]) == targets[..., None]  # gathers no divided vocabulary
        chosen = jnp.sum(jnp.where(here, logits, 0), axis=-1)
        probs = jnp.exp(logits - normalizer[..., None])
        return chosen - normalizer, normalizer - jnp.sum(probs * logits, axis=-1)

    if chunk == tokens:
        return of_chunk(hidden_RNM, targets_RN, 0)
    hidden = jnp.moveaxis(hidden_RNM.reshape(rows, chunk, -1, size), 2, 0)
    targets = jnp.moveaxis(targets_RN.reshape(rows, chunk, -1), 2, 0)
    each_chunk = hidden, targets, jnp.arange(chunks)
    outputs = jax.lax.map(lambda each: jax.checkpoint(of_chunk)(*each), each_chunk)
    logprobs, entropies = (jnp.moveaxis(x, 0, 2).reshape(rows, tokens) for x in outputs)
    return logprobs, entropies


def chunk_tokens(rows: int, tokens: int, vocab: int) -> int:
    """Tokens of a row in one chunk: halves of `tokens` until the chunk's logits fit, while they divide it and
    the devices that share a row divide them."""
    logits = CHUNK_LOGITS * size_of(*AXES)
    while tokens % (2 * size_of("sequence")) == 0 and rows * tokens * vocab > logits:
        tokens //= 2
    return tokens
