"""The log-probs an objective may look at, and the array functions it may use.

Shape suffix: N = tokens, in any order; objectives are elementwise, so any batch shape will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Namespace(Protocol):
    """The subset of the array API that objectives use: `torch`, `jax.numpy` and `numpy` all have it."""

    def exp(self, x: Any, /) -> Any: ...
    def minimum(self, x1: Any, x2: Any, /) -> Any: ...
    def clip(self, x: Any, min: float, max: float, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs of the same N tokens, in nats, under each policy. Gradients flow into `current_N` alone.

    `fixed_N` equals `current_N` as a constant (`detach`, `stop_gradient`): the array API has no
    stop-gradient, so the framework supplies it.
    """

    current_N: Any
    fixed_N: Any
    behavior_N: Any
    proximal_N: Any
    reference_N: Any = None
