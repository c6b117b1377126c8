"""REINFORCE with the ratio as a constant weight: AIPO and CISPO. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace


def weighted_gain(
    xp: Namespace, log_N: Any, advantages_N: Any, current_N: Any, *, low: float, cap: float
) -> Any:
    """A gain whose gradient is the off-policy corrected policy gradient.

        g = sg[clip(r, low, cap)] A log pi

    The weight is a constant: gradients flow through log pi alone, so no token is silenced, whatever the sign
    of A. Its value means nothing.

    Degenerate:
        On-policy (r = 1) -> REINFORCE with a baseline.
    Source:
        AIPO: LlamaRL, arXiv:2505.24034, section 6 (low 0, cap in [2, 10]). CISPO: arXiv:2506.13585, equations
        4 and 5 (cap 1 + eps_high; its value is not in the paper, which has no lower bound in effect. TRL and
        ms-swift have 5, as the preset).
    """
    return xp.clip(xp.exp(log_N), low, cap) * advantages_N * current_N
