"""The objective of every preset: a gain of the ratio, times what corrects for another policy, less penalties.

In the four terms of RLAX (arXiv:2512.06392): IS is `_weight`, Adv is given, Grad1 is `_gain` and Grad2 the
penalties; Agg is the framework's (`millrace.trainer.batch.flat_batch`). Shape suffix: N = tokens.
"""

from __future__ import annotations

from typing import Any

from millrace.algorithms.corrections import importance, not_drifted, taught
from millrace.algorithms.gains import ppo_gain, soft_gain, weighted_gain, within
from millrace.algorithms.logprobs import Namespace, TokenLogprobs
from millrace.algorithms.ratio import kl, log_ratio, with_gradient
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
