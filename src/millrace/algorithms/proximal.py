"""The proximal policy without a forward pass of its own. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any


def interpolated(current_N: Any, behavior_N: Any, staleness_N: Any, progress: float) -> Any:
    """Log-probs between those of the policy that sampled and the current ones, as versions lie between them.

        log pi_prox = log mu + alpha (log pi - log mu),   alpha = staleness / (staleness + progress)

    `progress` in (0, 1): the share of the batch's optimizer steps that has been made. The batch began
    `staleness` versions after the token was sampled, and the current policy is `progress` further.

    Shapes:
        current_N, behavior_N  (N,) constants, in nats
        staleness_N            (N,) in versions
        returns                (N,) a constant
    Degenerate:
        staleness 0 -> the policy that sampled. progress -> 0: the current policy.
    Source:
        A-3PO, arXiv:2512.06547. There versions are optimizer steps; here a version may be several, so the
        current policy lies a fraction of a version after the batch's beginning.
    """
    alpha_N = staleness_N / (staleness_N + progress)
    return behavior_N + alpha_N * (current_N - behavior_N)
