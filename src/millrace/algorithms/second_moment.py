"""M2PO's mask: which tokens of a whole batch are too far from the policy that sampled them.

Shape suffix: N = trained tokens of the batch; K = those that moved as their advantage pushes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def within_second_moment(
    proximal_N: Any, behavior_N: Any, advantages_N: Any, *, most: float
) -> NDArray[np.bool_]:
    """Leave out the tokens with the largest (log ratio)^2, of those that moved as they are pushed.

        pushed    A > 0 and pi_prox > mu;   A < 0 and pi_prox < mu
        m_k       log(pi_prox / mu)^2 of these
        left out  of these, where m_k > limit: the largest of the m_k at which the mean of min(m_k, limit) is
                  at most `most`

    It is a function of the whole batch, so it is settled before the first gradient.

    Shapes:
        proximal_N, behavior_N  (N,) log-probs in nats
        advantages_N            (N,)
        returns                 (N,) which tokens are kept
    Degenerate:
        On-policy -> all. All of the m_k are above `most` -> all that moved as they are pushed are left out.
    Source:
        M2PO, arXiv:2510.01161 (0.04 there), and its authors' code (Infini-AI-Lab/M2PO), which clips there.
        The gain is M r A, with r = pi / mu and no other clip. AReaL looks at all tokens.
    """
    log_N = np.asarray(proximal_N, float) - np.asarray(behavior_N, float)
    pushed_N = log_N * np.asarray(advantages_N) > 0
    moments_K = np.sort(log_N[pushed_N] ** 2)
    size = moments_K.size
    before_K = np.cumsum(moments_K) - moments_K
    means_K = (before_K + moments_K * (size - np.arange(size))) / max(size, 1)  # they never fall
    num_kept = int(np.searchsorted(means_K, most, side="right"))
    limit = moments_K[num_kept - 1] if num_kept else 0.0
    return ~pushed_N | (log_N**2 <= limit)
