"""What an adapter makes of a weight: one function, for who trains it and for who computes with it.

Shape suffixes: O = outputs, I = inputs, R = rank.
"""

from __future__ import annotations

from typing import Any

KINDS = DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""What an adapter's tensors are called behind the name of their layer."""

BASE = "base"
"""A tensor of every published version: the digest of the weights that its adapter belongs to, one number from
0 to 15 for each hex digit. Every number format holds these exactly."""


def adapted(weight_OI: Any, down_RI: Any, up_OR: Any, magnitude_O: Any | None, *, scale: float) -> Any:
    """W' = W + scale B A. With `magnitude_O`, each row is given the length of W's row plus `magnitude`.

    The order of the operations is fixed: equal inputs give equal bits to a trainer and to its replicas.

    Source:
        LoRA, arXiv:2106.09685, equation 3 (scale = alpha / r); DoRA, arXiv:2402.09353, equation 5, whose
        magnitude is |W| + longer: so rounding it rounds a change, not the weight.
    Degenerate:
        B = 0 and longer = 0 -> W. A row of zeros -> not a number with `magnitude_O`.
    """
    whole_OI = weight_OI + scale * (up_OR @ down_RI)
    if magnitude_O is None:
        return whole_OI
    return whole_OI * (lengths(weight_OI, magnitude_O) / row_lengths(whole_OI))[:, None]


def lengths(weight_OI: Any, magnitude_O: Any) -> Any:
    """(O,) what DoRA calls the magnitude."""
    return row_lengths(weight_OI) + magnitude_O


def row_lengths(weight_OI: Any) -> Any:
    """(O,) Euclidean lengths."""
    return (weight_OI * weight_OI).sum(-1) ** 0.5
