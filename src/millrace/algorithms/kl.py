"""Penalties that keep the policy near a reference. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace
from millrace.algorithms.ratio import LOG_MAX


def kl(xp: Namespace, current_N: Any, reference_N: Any, *, estimator: str) -> Any:
    """Estimate KL(pi || pi_ref) per token from the sampled token alone.

        d  = log(pi_ref / pi), within +-LOG_MAX
        k1 = -d              unbiased, of either sign; as a loss its gradient has the mean 0
        k2 = d^2 / 2         biased; as a loss its mean gradient is that of KL(pi || pi_ref)
        k3 = exp(d) - d - 1  unbiased, never negative; as a loss its mean gradient is that of KL(pi_ref || pi)

    Shapes:
        current_N, reference_N  (N,) log-probs in nats
        returns                 (N,)
    Degenerate:
        Equal log-probs -> 0, of k2 and k3 with gradient 0.
        A difference beyond the bound -> the value at the bound, with gradient 0.
    Source:
        http://joschu.net/blog/kl-approx.html; k3 as a loss: GRPO, arXiv:2402.03300, equation 4. Unbiased for
        tokens sampled from pi; for stale tokens it is a penalty, not an estimate. The bound is verl's, which
        also clamps k3 itself to 10. We do not: beyond a difference of 2.6 nats the penalty would lose its
        gradient. TRL clamps nothing. Gradients as losses: arXiv:2510.01555.
    """
    difference_N = xp.clip(reference_N - current_N, -LOG_MAX, LOG_MAX)
    match estimator:
        case "k1":
            return -difference_N
        case "k2":
            return difference_N * difference_N / 2.0
        case _:
            return xp.exp(difference_N) - difference_N - 1.0
