"""M2PO's mask: which tokens of a whole batch are too far from the policy that sampled them.

Shape suffix: N = trained tokens of the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def within_second_moment(proximal_N: Any, behavior_N: Any, *, most: float) -> NDArray[np.bool_]:
    """Leave out the tokens with the largest (log ratio)^2, as few as it takes.

        m_n = log(pi_prox / mu)^2;   keep the smallest ones, as many as have a mean of at most `most`

    It is a function of the whole batch, so it is settled before the first gradient.

    Shapes:
        proximal_N, behavior_N  (N,) log-probs in nats
        returns                 (N,) which tokens are kept
    Degenerate:
        On-policy -> all. Equal values are kept or left out in the order of the batch.
    Source:
        M2PO, arXiv:2510.01161 (0.04 there). The gain is M r A, with r = pi / mu and no other clip. All
        tokens count, as in AReaL. In the code of its authors (Infini-AI-Lab/M2PO) only those do that have
        moved as their advantage pushes them (A > 0 and r > 1, A < 0 and r < 1), and the others are never
        left out.
    """
    moments_N = (np.asarray(proximal_N, float) - np.asarray(behavior_N, float)) ** 2
    order = np.argsort(moments_N, kind="stable")
    means = np.cumsum(moments_N[order]) / np.arange(1, moments_N.size + 1)  # they never fall
    kept_N = np.zeros(moments_N.size, bool)
    kept_N[order[: np.searchsorted(means, most, side="right")]] = True
    return kept_N
