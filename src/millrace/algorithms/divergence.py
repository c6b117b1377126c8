"""DPPO: tokens are left out by how far their probability moved, not by its ratio.

Shape suffix: N = tokens.
"""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace

TINY = 1e-8  # keeps the log of the other tokens' probability finite


def within(
    xp: Namespace, fixed_N: Any, anchor_N: Any, advantages_N: Any, *, measure: str, low: float, high: float
) -> Any:
    """1 where a token may still be moved, 0 where it has moved far enough in the direction it is pushed to.

        left out  A > 0, p > q and D > high;   A <= 0, p < q and D > low       (p current, q anchor)
        tv        D = |p - q|
        kl        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Both compare the token with all others together, which bounds the divergence of the whole distribution
    from below. A rare token may grow many times over; a likely one may not lose much.

    Source:
        DPPO, arXiv:2602.04879 (binary TV and binary KL). The thresholds of the presets, 0.15 for TV and 0.05
        for KL, are those of the script that its authors gave to verl (pull request 5397). Others use 0.2 for
        TV.
    """
    p_N, q_N = xp.exp(fixed_N), xp.exp(anchor_N)
    if measure == "tv":
        moved_N = xp.maximum(p_N - q_N, q_N - p_N)
    else:
        others_N = xp.log((1.0 - q_N + TINY) / (1.0 - p_N + TINY))
        moved_N = q_N * (anchor_N - fixed_N) + (1.0 - q_N) * others_N
    risen_N = (advantages_N > 0) & (p_N > q_N) & (moved_N > high)
    fallen_N = (advantages_N <= 0) & (p_N < q_N) & (moved_N > low)
    return xp.where(risen_N | fallen_N, 0 * p_N, 0 * p_N + 1.0)
