"""Token masks as arrays of few shapes, and the logits that they cut off.

See `trainer.recorded.recorded_token_masks`.

Shape suffixes: R rows, N trained tokens of a row, K allowed tokens of all of them, C tokens of a row in a
chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from millrace.trainer.recorded.recorded_token_masks import TokenMasks
from millrace_jax.row_arrays import bucket

Array = Any
CUT = -1e30
"""The logit of a token that could not be sampled. Finite, so that its share of an entropy is 0."""


class MaskArrays(NamedTuple):
    """`cut_RN`: only allowed tokens stay. Entry k of a row allows `tokens_RK[k]` at its place `places_RK[k]`.
    Padding has the place N."""

    cut_RN: Array
    places_RK: Array
    tokens_RK: Array


def mask_arrays(masks_C: TokenMasks | None, flat_RN: NDArray[np.int64]) -> MaskArrays | None:
    """`masks_C`: of the batch's completion tokens. `flat_RN`: the token at each place of the rows, or -1."""
    if masks_C is None:
        return None
    places = [np.flatnonzero(flat_N >= 0) for flat_N in flat_RN]
    masks = [masks_C.of(flat_N[place]) for flat_N, place in zip(flat_RN, places, strict=True)]
    entries = bucket(max(len(each.tokens_K) for each in masks))
    cut_RN = np.zeros(flat_RN.shape, bool)
    places_RK = np.full((len(masks), entries), flat_RN.shape[1], np.int32)
    tokens_RK = np.zeros((len(masks), entries), np.int32)
    for row, (place, each) in enumerate(zip(places, masks, strict=True)):
        cut_RN[row, place] = each.counts_N > 0
        places_RK[row, : len(each.tokens_K)] = np.repeat(place, each.counts_N)
        tokens_RK[row, : len(each.tokens_K)] = each.tokens_K
    return MaskArrays(cut_RN, places_RK, tokens_RK)


def cut_off(logits_RCV: Array, masks: MaskArrays, chunk: Array, chunks: int) -> Array:
    """The logits of every `chunks`-th token from number `chunk` on. What is not allowed is CUT."""
    rows, tokens, _ = logits_RCV.shape
    here_RK = masks.places_RK % chunks == chunk
    places_RK = jnp.where(here_RK, masks.places_RK // chunks, tokens)  # a place that is not there is dropped
    cut_RC = masks.cut_RN.reshape(rows, tokens, chunks)[:, :, chunk]
    outside = jnp.broadcast_to(cut_RC[..., None], logits_RCV.shape)
    row_RK = jnp.arange(rows)[:, None]
    outside = outside.at[row_RK, places_RK, masks.tokens_RK].set(False, mode="drop")
    return jnp.where(outside, CUT, logits_RCV)
