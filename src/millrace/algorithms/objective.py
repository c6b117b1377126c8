"""The objective of every preset: a gain of the ratio, times what corrects for another policy, less penalties.

In the four terms of RLAX (arXiv:2512.06392): IS is `_weight`, Adv is given, Grad1 is `_gain` and Grad2 the
penalties; Agg is the framework's (`millrace.trainer.batch.flat_batch`). Shape suffix: N = tokens.
"""

from __future__ import annotations

from typing import Any

from millrace.algorithms.corrections import importance, not_drifted, taught
from millrace.algorithms.logprobs import Namespace, TokenLogprobs, kl, log_ratio, with_gradient
from millrace.config.tables.algorithms import PolicyGradient


def policy_gradient(
    xp: Namespace, logprobs: TokenLogprobs, advantages_N: Any, *, config: PolicyGradient
) -> Any:
    """Loss of each token.

        loss = -sg[w] g + kl k(pi || pi_ref) - entropy H

    Shapes:
        logprobs      (N,) each, in nats
        advantages_N  (N,)
        returns       (N,) not yet masked, weighted or summed
    Degenerate:
        One optimizer step a batch and the proximal policy as the anchor: g has the gradient A grad log pi.
        kl, entropy 0 -> reference and entropy are not looked at.
    """
    if config.teacher is not None:
        reward, teacher = config.reward_weight, config.teacher_weight
        advantages_N = taught(xp, logprobs, advantages_N, reward=reward, teacher=teacher)
    loss_N = -_gain(xp, logprobs, advantages_N, config)
    if config.correction is not None:
        loss_N = loss_N * importance(
            xp,
            logprobs,
            low=config.correction_low,
            cap=config.correction,
            level=config.correction_of,
            outside=config.correction_outside,
        )
    if config.drift is not None:
        loss_N = loss_N * not_drifted(xp, logprobs, advantages_N, drift=config.drift)
    if config.kl > 0 and config.kl_in == "loss":
        penalty_N = kl(xp, logprobs.current_N, logprobs.reference_N, estimator=config.kl_estimator)
        loss_N = loss_N + config.kl * penalty_N
    if config.entropy > 0:
        loss_N = loss_N - config.entropy * logprobs.entropy_N
    return loss_N


def _gain(xp: Namespace, logprobs: TokenLogprobs, advantages_N: Any, config: PolicyGradient) -> Any:
    log_N = log_ratio(xp, logprobs, anchor=config.anchor, level=config.ratio)
    u_N = with_gradient(xp, log_N, logprobs)
    current_N = logprobs.current_N
    low, high = config.clip_low, config.clip_high
    if config.clip == "ppo":
        return ppo_gain(xp, u_N, advantages_N, low=low, high=high, dual=config.clip_dual)
    if config.clip == "soft":
        positive, negative = config.gate_positive, config.gate_negative
        return soft_gain(xp, u_N, advantages_N, positive=positive, negative=negative)
    if config.clip == "none":
        return u_N * advantages_N
    if config.clip == "weight":
        return weighted_gain(xp, log_N, advantages_N, current_N, low=config.rho_low, cap=config.rho)
    anchor_N = logprobs.behavior_N if config.anchor == "behavior" else logprobs.proximal_N
    kept_N = within(xp, logprobs.fixed_N, anchor_N, advantages_N, measure=config.clip, low=low, high=high)
    return kept_N * weighted_gain(xp, log_N, advantages_N, current_N, low=0.0, cap=config.rho)


def ppo_gain(
    xp: Namespace, u_N: Any, advantages_N: Any, *, low: float, high: float, dual: float | None
) -> Any:
    """The pessimistic gain of a token.

        g = min(u A, clip(u, 1 - low, 1 + high) A),   and where A < 0:  max(g, dual A)

    A good token stops to count once its ratio is above 1 + high, a bad one once it is below 1 - low. Without
    `dual`, a bad token whose ratio has grown counts by that ratio, however large.

    Degenerate:
        u = 1 -> u A, with the gradient A grad log pi: nothing is clipped.
    Source:
        PPO, arXiv:1707.06347, equation 7; low != high: DAPO, arXiv:2503.14476, equation 10; dual:
        arXiv:1912.09729, equation 5, and as the two-sided clip of INTELLECT-2, arXiv:2505.07291 (4 there).
    """
    clipped_N = xp.clip(u_N, 1.0 - low, 1.0 + high)
    gain_N = xp.minimum(u_N * advantages_N, clipped_N * advantages_N)
    if dual is None:
        return gain_N
    return xp.where(advantages_N < 0, xp.maximum(gain_N, dual * advantages_N), gain_N)


def soft_gain(xp: Namespace, u_N: Any, advantages_N: Any, *, positive: float, negative: float) -> Any:
    """A gain whose slope fades as the ratio leaves 1.

        g = (4 / tau) sigmoid(tau (u - 1)) A,   tau = positive where A > 0, else negative
        d g / d u = 4 p (1 - p) A,  p = sigmoid(tau (u - 1)): A at u = 1, and 0 far from it

    Degenerate:
        u = 1 -> the gradient is A grad log pi.
    Source:
        SAPO, arXiv:2511.20347 (1.0 and 1.05, which ms-swift's documentation cites as the paper's defaults).
    """
    tau_N = xp.where(advantages_N > 0, 0 * u_N + positive, 0 * u_N + negative)
    return 4.0 / tau_N / (1.0 + xp.exp(-tau_N * (u_N - 1.0))) * advantages_N


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


TINY = 1e-8  # keeps the log of the other tokens' probability finite


def within(
    xp: Namespace, fixed_N: Any, anchor_N: Any, advantages_N: Any, *, measure: str, low: float, high: float
) -> Any:
    """1 where a token may still be moved, 0 where it has moved far enough in the direction it is pushed to.

        left out  A > 0, p > q and D > high;   A <= 0, p < q and D > low       (p current, q anchor)
        tv        D = |p - q|
        kl        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Both compare the token with all others together, which bounds the divergence of the whole distribution
    from below. A rare token may grow many times over; a likely one may not lose much.

    Source:
        DPPO, arXiv:2602.04879 (binary TV and binary KL). The thresholds of the presets, 0.15 for TV and 0.05
        for KL, are those of the script that its authors gave to verl (pull request 5397). Others use 0.2 for
        TV.
    """
    p_N, q_N = xp.exp(fixed_N), xp.exp(anchor_N)
    if measure == "tv":
        moved_N = xp.maximum(p_N - q_N, q_N - p_N)
    else:
        others_N = xp.log((1.0 - q_N + TINY) / (1.0 - p_N + TINY))
        moved_N = q_N * (anchor_N - fixed_N) + (1.0 - q_N) * others_N
    risen_N = (advantages_N > 0) & (p_N > q_N) & (moved_N > high)
    fallen_N = (advantages_N <= 0) & (p_N < q_N) & (moved_N > low)
    return xp.where(risen_N | fallen_N, 0 * p_N, 0 * p_N + 1.0)
