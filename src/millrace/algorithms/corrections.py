"""What a token counts that another policy sampled: TIS, IcePop, masks of sequences, M2PO's mask, a teacher.

Shape suffix: N = tokens. K = tokens that moved as their advantage pushes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.logprobs import LOG_MAX, Namespace, TokenLogprobs


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


def not_drifted(xp: Namespace, logprobs: TokenLogprobs, advantages_N: Any, *, drift: float) -> Any:
    """0 for a sequence that is bad and that the current policy would hardly sample, else 1; a constant.

        0  where  A < 0  and  mean over the sequence of log(mu / pi) > drift

    What a policy does not do any more teaches it little, and such sequences have the largest ratios of other
    tokens. Good sequences stay, however old.

    Source:
        DeepSeek-V3.2, arXiv:2512.02556, section 3.1 (off-policy sequence masking; mu there: what the engine
        recorded). Its threshold is not published. Trinity-RFT (pull request 420) found 0.05 to 0.2
        reasonable, TRL's documentation begins with 0.5; the preset has 0.1.
    """
    gone_N = logprobs.sequences.mean(logprobs.behavior_N - logprobs.fixed_N)
    return xp.where((advantages_N < 0) & (gone_N > drift), 0 * gone_N, 0 * gone_N + 1.0)


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
