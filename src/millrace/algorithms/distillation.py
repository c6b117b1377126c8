"""A teacher's opinion of each token as its advantage. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace, TokenLogprobs
from millrace.algorithms.ratio import LOG_MAX


def taught(
    xp: Namespace, logprobs: TokenLogprobs, advantages_N: Any, *, reward: float, teacher: float
) -> Any:
    """Advantages of rewards and of a teacher together.

        A' = reward A + teacher (log pi_teacher - log pi_prox)

    The second term is an estimate of -KL(pi || pi_teacher) at each token. With `reward` 0 and one step a
    batch the mean gradient is that of the reverse KL to the teacher at every state that the student visits.

    Shapes:
        advantages_N  (N,)
        returns       (N,) constants; differences of log-probs are within +-LOG_MAX
    Degenerate:
        The teacher agrees -> the advantage of the rewards.
    Source:
        On-policy distillation: GKD, arXiv:2306.13649 (reverse KL on the student's own completions); MiniLLM,
        arXiv:2306.08543, as a policy gradient. Here a token answers for itself alone, not for later ones.
    """
    difference_N = xp.clip(logprobs.reference_N - logprobs.proximal_N, -LOG_MAX, LOG_MAX)
    return reward * advantages_N + teacher * difference_N
