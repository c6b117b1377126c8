"""AIPO: asynchronous importance-weighted policy optimisation. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace, TokenLogprobs


def aipo_objective(xp: Namespace, logprobs: TokenLogprobs, advantages_N: Any, *, rho: float) -> Any:
    """Per-token loss whose gradient is the off-policy corrected policy gradient, clipped on one side.

        loss = -sg[min(pi / pi_behavior, rho)] A log pi

    The weight is a constant: gradients flow through log pi only, so a token is never silenced, whatever
    the sign of A, and there is no lower bound on the weight.

    Shapes:
        logprobs      (N,) each, in nats; `behavior_N` of the distribution really sampled from
        advantages_N  (N,) reward minus the group's mean
        returns       (N,) per-token loss, not yet masked, weighted or summed; its value means nothing
    Degenerate:
        On-policy (pi = pi_behavior) -> REINFORCE with a baseline.
    Source:
        LlamaRL, arXiv:2505.24034, section 6; rho in [2, 10] there.
    """
    weight_N = xp.clip(xp.exp(logprobs.fixed_N - logprobs.behavior_N), 0.0, rho)
    return -weight_N * advantages_N * logprobs.current_N
