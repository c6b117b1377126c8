"""The first value of a forward pass that is farther from the reference than rounding explains.

T: tokens of the sequence. A value of L layers grows its rounding error like a sum of L independent ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = Mapping[str, NDArray[np.floating[Any]]]

BOUNDS = {"float32": 1e-5, "bfloat16": 16 * 2.0**-8, "float16": 16 * 2.0**-11}
"""The relative distance that rounding explains in the first layer, by the format of matrix products."""

OPERATIONS = {
    "embedding": "the embedding of tokens",
    "input_norm": "the norm before attention",
    "q": "the query projection",
    "k": "the key projection",
    "v": "the value projection",
    "q_norm": "the norm of queries",
    "k_norm": "the norm of keys",
    "q_rope": "the rotary embedding of queries",
    "k_rope": "the rotary embedding of keys",
    "attention": "attention over keys and values",
    "o": "the output projection of attention",
    "o_norm": "the norm after attention",
    "residual": "the residual stream after attention",
    "mlp_norm": "the norm before the MLP",
    "gated": "gate and up projections",
    "down": "the down projection",
    "down_norm": "the norm after the MLP",
    "output": "the residual stream after the MLP",
    "norm": "the final norm",
    "logits": "logits",
    "logprobs": "log-probs",
}
"""The last part of a value's name, and the operation that computed it, in the order of a layer."""


@dataclass(frozen=True)
class Divergence:
    """A value beyond its bound. `layer` None: outside of the layers."""

    layer: int | None
    operation: str
    distance: float
    bound: float

    @property
    def place(self) -> str:
        return self.operation if self.layer is None else f"layer {self.layer}: {self.operation}"

    def __str__(self) -> str:
        numbers = f"off by {self.distance:.1e}, rounding explains {self.bound:.1e}"
        return f"{self.place}, {OPERATIONS[self.operation]}: {numbers}"


def first_divergence(reference: Values, side: Values, computing: str) -> Divergence | None:
    """The first of the values that both sides name, in the order in which the reference computed them, whose
    distance is over its bound; None: there is none. What comes after it is of no interest.

    `computing`: the format of the side's matrix products, a key of `BOUNDS`."""
    layer = 0
    for name, expected in reference.items():
        *of_layer, operation = name.removeprefix("layers.").split(".")
        layer = int(of_layer[0]) if of_layer else layer
        if name not in side:
            continue
        bound = BOUNDS[computing] * math.sqrt(1 + layer)
        distance = _distance(expected, side[name])
        if not distance <= bound:  # NaN is no number within it
            return Divergence(layer if of_layer else None, operation, distance, bound)
    return None


def _distance(expected: NDArray[Any], computed: NDArray[Any]) -> float:
    """The largest relative distance of a token: its difference by its length, (T, width). Of log-probs, (T,):
    in nats, or relative where they are below -1."""
    if expected.shape != computed.shape:
        return math.inf
    if expected.ndim == 1:
        return float(np.max(np.abs(computed - expected) / np.maximum(1, np.abs(expected))))
    lengths = np.linalg.norm(expected, axis=1)
    return float(np.max(np.linalg.norm(computed - expected, axis=1) / np.maximum(lengths, 1e-30)))


def logprob_gap(reference: Values, side: Values) -> tuple[float, float]:
    """The largest and the mean difference of the sequence's log-probs, in nats."""
    gaps = np.abs(side["logprobs"] - reference["logprobs"])
    return float(gaps.max()), float(gaps.mean())
