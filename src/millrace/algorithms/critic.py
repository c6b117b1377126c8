"""What a critic learns. Shape suffix: N = tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millrace.algorithms.logprobs import Namespace


@dataclass(frozen=True, slots=True)
class Critic:
    """A linear head on the trained model that predicts the return from before each token.

    loss   (xp, values_N, before_N, returns_N) -> (N,); `before_N`: the values at the batch's beginning
    lr     the head's learning rate
    trunk  how much of the gradient of the loss goes on into the model; 0: the head alone learns
    """

    loss: Callable[..., Any]
    lr: float
    trunk: float = 0.0


def value_loss(xp: Namespace, values_N: Any, before_N: Any, returns_N: Any, *, clip: float | None) -> Any:
    """Half the squared error of each value.

        L = 1/2 max((V - R)^2, (V_clip - R)^2),   V_clip = V_before + clip(V - V_before, -clip, clip)

    Shapes:
        values_N, before_N, returns_N  (N,); the last two are constants. R = A + V_before, A of GAE
    Degenerate:
        clip None, or the first optimizer step of a batch -> the plain squared error.
    Source:
        PPO, arXiv:1707.06347, equation 9; the clip is of its authors' code (see arXiv:2006.05990, which finds
        no gain in it).
    """
    error_N = (values_N - returns_N) ** 2
    if clip is not None:
        near_N = before_N + xp.clip(values_N - before_N, -clip, clip)
        error_N = xp.maximum(error_N, (near_N - returns_N) ** 2)
    return error_N / 2.0
