"""What a token counts that another policy sampled: TIS, by token or by sequence, and IcePop.

Shape suffix: N = tokens.
"""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace, TokenLogprobs
from millrace.algorithms.ratio import LOG_MAX


def importance(
    xp: Namespace, logprobs: TokenLogprobs, *, low: float, cap: float, level: str, outside: str
) -> Any:
    """The importance weight of the policy at the batch's beginning over the one that sampled; a constant.

        token     w = pi_prox / mu
        sequence  w = the product of that over the trained tokens of the sequence
        clip      clip(w, low, cap)
        drop      w where low <= w <= cap, else 0

    Degenerate:
        Equal policies -> 1.
    Source:
        Truncated: IMPALA, arXiv:1802.01561, and decoupled PPO, AReaL, arXiv:2505.24298, equation 5 (not
        truncated there). drop: IcePop, arXiv:2510.18855 (0.5 and 5 there). Weights are within
        exp(+-LOG_MAX).
    """
    log_N = logprobs.proximal_N - logprobs.behavior_N
    if level == "sequence":
        log_N = logprobs.sequences.total(log_N)
    w_N = xp.exp(xp.clip(log_N, -LOG_MAX, LOG_MAX))
    if outside == "clip":
        return xp.clip(w_N, low, cap)
    return xp.where((w_N >= low) & (w_N <= cap), w_N, 0 * w_N)
