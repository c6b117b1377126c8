"""The clipped, decoupled policy-gradient objective of GRPO and its relatives.

Shape suffix: N = tokens.
"""

from __future__ import annotations

from typing import Any

from millrace.algorithms.kl import kl_k3
from millrace.algorithms.logprobs import Namespace, TokenLogprobs


def grpo_objective(
    xp: Namespace,
    logprobs: TokenLogprobs,
    advantages_N: Any,
    *,
    clip_low: float,
    clip_high: float,
    correction: float | None,
    kl: float,
) -> Any:
    """Per-token loss of clipped policy optimisation, with the sampling policy decoupled from the anchor.

        u = pi / pi_prox
        w = min(pi_prox / pi_behavior, correction)      (1 if correction is None; a constant)
        loss = -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) + kl k3(pi || pi_ref)

    Shapes:
        logprobs      (N,) each, in nats
        advantages_N  (N,) the advantage of the token's trajectory
        returns       (N,) per-token loss, not yet masked, weighted or summed
    Degenerate:
        current = proximal (one optimizer step per batch) -> u = 1, and the gradient is
        -w A grad log pi: nothing is clipped.
        proximal = behavior and correction None -> plain GRPO.
        kl = 0 -> the reference is not looked at.
    Source:
        GRPO, arXiv:2402.03300, equation 3 (clip and KL); clip_low != clip_high: DAPO,
        arXiv:2503.14476, equation 10; decoupled: AReaL, arXiv:2505.24298, equation 5; the cap of w is
        the truncated importance sampling of IMPALA, arXiv:1802.01561.
    """
    u_N = xp.exp(logprobs.current_N - logprobs.proximal_N)
    clipped_N = xp.clip(u_N, 1.0 - clip_low, 1.0 + clip_high)
    loss_N = -xp.minimum(u_N * advantages_N, clipped_N * advantages_N)
    if correction is not None:
        w_N = xp.exp(logprobs.proximal_N - logprobs.behavior_N)
        loss_N = xp.clip(w_N, 0.0, correction) * loss_N
    if kl > 0:
        loss_N = loss_N + kl * kl_k3(xp, logprobs.current_N, logprobs.reference_N)
    return loss_N
