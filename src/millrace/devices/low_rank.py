"""The weight with its adapter: one function, for the trainer and for the replicas.

Shape suffixes: O = outputs, I = inputs, R = rank.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

KINDS = DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""The names of an adapter's tensors, behind the name of their layer."""

BASE = "base"
"""A tensor of every published version: the digest of the adapter's base weights, one number from 0 to 15 for
each hex digit. Every number format has these numbers exactly."""


def adapted(weight_OI: Any, down_RI: Any, up_OR: Any, magnitude_O: Any | None, *, scale: float) -> Any:
    """W' = W + scale B A. With `magnitude_O`, each row gets the length of W's row plus `magnitude_O`.

    The order of the operations is fixed: equal inputs give equal bits to a trainer and to its replicas.

    Source:
        LoRA, arXiv:2106.09685, equation 3 (scale = alpha / r); DoRA, arXiv:2402.09353, equation 5. DoRA's
        magnitude is |W| + `magnitude_O`. So rounding the tensor rounds a change, not the weight.
    Degenerate:
        B = 0 and `magnitude_O` = 0 -> W. A row of zeros -> not a number with `magnitude_O`.
    """
    adapted_OI = weight_OI + scale * (up_OR @ down_RI)
    if magnitude_O is None:
        return adapted_OI
    return adapted_OI * (lengths(weight_OI, magnitude_O) / row_lengths(adapted_OI))[:, None]


def first_down(layer: str, shape_RI: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """(R, I) A of version 0, from peft's distribution, by `seed` and the layer's name. Every trainer begins
    with these numbers: those of `torch.Tensor.uniform_` with a generator that has this seed."""
    bound = np.float32(1 / math.sqrt(shape_RI[1]))  # kaiming_uniform_ with a = sqrt(5)
    digest = xxh3_64_intdigest(f"{seed} {layer}".encode()) >> 1
    bits = np.random.RandomState(digest & 0xFFFFFFFF).randint(0, 1 << 32, shape_RI, dtype=np.uint32)
    shares = (bits & 0xFFFFFF) * 2.0**-23 - 1  # float64, at least -1 and less than 1
    return (shares * float(bound)).astype(np.float32)


def lengths(weight_OI: Any, magnitude_O: Any) -> Any:
    """(O,) DoRA's magnitude: |W| + `magnitude_O`."""
    return row_lengths(weight_OI) + magnitude_O


def row_lengths(weight_OI: Any) -> Any:
    """(O,) Euclidean lengths."""
    return (weight_OI * weight_OI).sum(-1) ** 0.5
