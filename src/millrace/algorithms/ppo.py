"""PPO's clip, and its second bound for bad tokens. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace


def ppo_gain(
    xp: Namespace, u_N: Any, advantages_N: Any, *, low: float, high: float, dual: float | None
) -> Any:
    """The pessimistic gain of a token.

        g = min(u A, clip(u, 1 - low, 1 + high) A),   and where A < 0:  max(g, dual A)

    A good token stops to count once its ratio is above 1 + high, a bad one once it is below 1 - low. Without
    `dual`, a bad token whose ratio has grown counts by that ratio, however large.

    Degenerate:
        u = 1 -> u A, with the gradient A grad log pi: nothing is clipped.
    Source:
        PPO, arXiv:1707.06347, equation 7; low != high: DAPO, arXiv:2503.14476, equation 10; dual:
        arXiv:1912.09729, equation 5, and as the two-sided clip of INTELLECT-2, arXiv:2505.07291 (4 there).
    """
    clipped_N = xp.clip(u_N, 1.0 - low, 1.0 + high)
    gain_N = xp.minimum(u_N * advantages_N, clipped_N * advantages_N)
    if dual is None:
        return gain_N
    return xp.where(advantages_N < 0, xp.maximum(gain_N, dual * advantages_N), gain_N)
