"""The weight of one token in a batch's loss.

    loss = sum over trained tokens of weight * objective

The weights are computed for the whole batch before packing, so neither micro-batching nor packing can change
a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.build import Normalize


def token_weights(
    masks: Sequence[NDArray[np.bool_]], normalize: Normalize, *, max_tokens: int
) -> list[NDArray[np.float64]]:
    """Weight of every completion token; zero where the mask is.

    With N sequences, n_i trained tokens in sequence i:

        sequence    1 / (N n_i)           mean over a sequence, then over sequences (GRPO)
        token       1 / sum_i n_i         mean over all tokens (DAPO, arXiv:2503.14476)
        max_tokens  1 / (N max_tokens)    sum over the constant budget (Dr. GRPO, arXiv:2503.20783)

    Shapes:
        masks    one (length_i,) per sequence
        returns  one (length_i,) per sequence
    N and n_i are of the whole optimizer step, and no weight depends on groups. So a group that lost
    trajectories counts less than a complete group, in proportion to its sequences or tokens.

    Degenerate:
        A sequence without a trained token gets zeros, and still counts in N.
    """
    counts = [int(mask.sum()) for mask in masks]
    match normalize:
        case "sequence":
            scales = [1.0 / (len(masks) * max(count, 1)) for count in counts]
        case "token":
            scales = [1.0 / max(sum(counts), 1)] * len(masks)
        case "max_tokens":
            scales = [1.0 / (len(masks) * max_tokens)] * len(masks)
    return [np.where(mask, scale, 0.0) for mask, scale in zip(masks, scales, strict=True)]
