"""SAPO: a smooth gate in place of a clip. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace


def soft_gain(xp: Namespace, u_N: Any, advantages_N: Any, *, positive: float, negative: float) -> Any:
    """A gain whose slope fades as the ratio leaves 1.

        g = (4 / tau) sigmoid(tau (u - 1)) A,   tau = positive where A > 0, else negative
        d g / d u = 4 p (1 - p) A,  p = sigmoid(tau (u - 1)): A at u = 1, and 0 far from it

    Degenerate:
        u = 1 -> the gradient is A grad log pi.
    Source:
        SAPO, arXiv:2511.20347 (1.0 and 1.05, which ms-swift's documentation cites as the paper's defaults).
    """
    tau_N = xp.where(advantages_N > 0, 0 * u_N + positive, 0 * u_N + negative)
    return 4.0 / tau_N / (1.0 + xp.exp(-tau_N * (u_N - 1.0))) * advantages_N
