"""A penalty that keeps the policy near a reference. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace

DIFFERENCE_MAX = 20.0  # nats: exp(20) = 4.9e8; from 89 on, exp overflows in float32


def kl_k3(xp: Namespace, current_N: Any, reference_N: Any) -> Any:
    """Estimate KL(pi || pi_ref) per token from the sampled token alone.

        k3 = pi_ref / pi - log(pi_ref / pi) - 1,    log(pi_ref / pi) clamped to +-DIFFERENCE_MAX

    Shapes:
        current_N, reference_N  (N,) log-probs in nats
        returns                 (N,) never negative
    Degenerate:
        Equal log-probs -> 0, with gradient 0.
        A difference beyond the clamp -> the value at the clamp, with gradient 0.
    Source:
        GRPO, arXiv:2402.03300, equation 4 (Schulman's k3). Unbiased for tokens sampled from pi; for
        stale tokens it is a penalty, not an estimate. The clamp is verl's, which also clamps k3 itself to 10.
        We do not: beyond a difference of 2.6 nats the penalty would lose its gradient. TRL clamps nothing.
    """
    difference_N = xp.clip(reference_N - current_N, -DIFFERENCE_MAX, DIFFERENCE_MAX)
    return xp.exp(difference_N) - difference_N - 1.0
