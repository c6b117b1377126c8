"""Advantages: how good a trajectory was, compared with the others of its group; credit for its parts, which
are turns or sequences; and advantages from the values of a critic.

Pure functions (numpy, float64). Shape suffixes: G = trajectories of one group; K = turns, S = sequences, T =
tokens of one trajectory; N = trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.group import ComparedGroup
from millrace.algorithms.logprobs import Namespace
from millrace.core.errors import DataError
from millrace.core.rounding import all_equal

EPS = 1e-6  # what is divided by is never 0

Scale = Literal["std", "mean", "none"]
Baseline = Literal["group", "others", "none"]


def group_advantages(group: ComparedGroup, *, scale: Scale, baseline: Baseline = "group") -> NDArray[Any]:
    """Compare rewards within one group.

        A_i = (r_i - b_i) / d
        b   group: mean(r)   others: mean(r_j, j != i)   none: 0
        d   std: std(r) + EPS   mean: mean(r) + EPS   none: 1

    Shapes:
        returns  (G,); with a baseline it sums to 0 up to rounding
    Degenerate:
        All rewards equal but for rounding, with a baseline -> exactly zero: the group teaches nothing. One
        trajectory -> 0.
        scale "mean" and a mean of 0 or less -> all zeros.
    Source:
        GRPO, arXiv:2402.03300, section 4.1.2 (std; the paper leaves the estimator open, we take the one of
        the population). Dr. GRPO, arXiv:2503.20783, and AIPO, arXiv:2505.24034 (none). MaxRL,
        arXiv:2602.02710 (mean: the gradient of log p(correct), as far as G samples tell it; for rewards of 0
        and 1; as in its authors' code). REINFORCE (no baseline). RLOO, arXiv:2402.14740, equation 8 (others:
        an unbiased baseline).
    """
    rewards = group.rewards_G
    match baseline:
        case "group":
            centered = _centered(rewards)
        case "others":
            centered = _centered(rewards) * (rewards.size / max(rewards.size - 1, 1))
        case "none":
            centered = rewards
    match scale:
        case "std":
            return centered / (rewards.std() + EPS)
        case "mean":
            return centered / (rewards.mean() + EPS) if rewards.mean() > 0 else np.zeros(rewards.size)
        case "none":
            return centered


def leave_one_out_advantages(group: ComparedGroup) -> NDArray[Any]:
    """Compare each trajectory with the mean of the others: RLOO, arXiv:2402.14740, equation 8."""
    return group_advantages(group, scale="none", baseline="others")


def whitened(advantages_N: NDArray[Any]) -> NDArray[Any]:
    """Advantages of all trained tokens of a batch, with the mean 0 and the standard deviation 1.

    Degenerate:
        All equal -> all zeros.
    Source:
        REINFORCE++, arXiv:2501.03262, equation 10: over the tokens of the whole batch, not of a group. With a
        group's baseline before it: REINFORCE++-baseline.
    """
    return _centered(advantages_N) / (advantages_N.std() + EPS)


def _centered(values: NDArray[Any]) -> NDArray[Any]:
    """Less their mean. Values that are equal but for rounding become 0."""
    if all_equal((values.min(), values.max())):
        return np.zeros(values.size)
    return values - values.mean()


# ---------------------------------------------------------------- parts of a trajectory


def turn_advantages(
    group: ComparedGroup, *, scale: Scale, baseline: Baseline, discount: float
) -> list[NDArray[Any]]:
    """Compare each turn with the same turn of the others, and with what came after it.

        A_k = sum over l >= k of discount^(l - k) I_l  +  discount^(K - k) O

    O is the advantage of the trajectory's reward in its group. I_l is that of its reward for turn l, among
    those trajectories of the group that have a reward for turn l.

    Shapes:
        returns  for each trajectory (length,): all tokens of a turn have that of the turn
    Degenerate:
        No rewards of turns, discount 1 -> `group_advantages`. A turn without a reward, or with the only one
        in its group -> I_l is 0 (with a baseline).
    Source:
        MT-GRPO, arXiv:2505.11821 (version 2), with alpha for `discount`. There the last turn has no reward of
        its own, and every trajectory has K turns. Here both may be otherwise.
    """
    outcome_G = group_advantages(group, scale=scale, baseline=baseline)
    rewards = group.turn_rewards or [np.full(turns, np.nan) for turns in group.turns_G]
    own_GK = _by_number(group, rewards, scale=scale, baseline=baseline)
    found = []
    for outcome, own_K, turns, turn_T in zip(outcome_G, own_GK, group.turns_G, group.turn_of, strict=True):
        advantages_K = own_K[:turns].copy()
        advantages_K[-1:] += outcome
        for later, k in pairwise(range(turns - 1, -1, -1)):
            advantages_K[k] += discount * advantages_K[later]
        found.append(np.append(advantages_K, 0.0)[turn_T])
    return found


def sequence_advantages(
    group: ComparedGroup, *, scale: Scale, baseline: Baseline, share: float
) -> list[NDArray[Any]]:
    """Mix what a sequence earned with what its trajectory earned.

        A_s = (1 - share) O + share I_s

    O is the advantage of the trajectory's reward in its group. I_s is that of the return of sequence s, among
    those trajectories of the group that have a sequence s.

    Shapes:
        returns  for each trajectory (length,): all tokens of a sequence have that of the sequence
    Degenerate:
        share 0, or one sequence in every trajectory -> `group_advantages`. The only sequence s of its group
        -> I_s is 0 (with a baseline).
    Source:
        Our own. AT-GRPO, arXiv:2510.11062, compares an agent with itself too.
    """
    outcome_G = group_advantages(group, scale=scale, baseline=baseline)
    own_GS = _by_number(group, sequence_returns(group), scale=scale, baseline=baseline)
    mixed_GS = (1 - share) * outcome_G[:, None] + share * own_GS
    return [mixed_S[sequence_T] for mixed_S, sequence_T in zip(mixed_GS, group.sequence_of, strict=True)]


def sequence_returns(group: ComparedGroup) -> list[NDArray[np.float64]]:
    """What each sequence of a trajectory earned: the rewards of its turns. The sequence of the last turn has
    the rest of the trajectory's reward. So their sum is the reward."""
    found = []
    rewards = group.turn_rewards or [np.zeros(turns) for turns in group.turns_G]
    members = zip(group.rewards_G, rewards, group.turn_of, group.sequence_of, strict=True)
    for reward, rewards_K, turn_T, own_T in members:
        sequence_K = own_T[np.flatnonzero(np.diff(turn_T, prepend=-1) > 0)]
        returns_S = np.bincount(sequence_K, np.nan_to_num(rewards_K), own_T.max(initial=0) + 1).astype(float)
        last = sequence_K[-1:]
        returns_S[last] = 0.0
        returns_S[last] = reward - returns_S.sum()
        found.append(returns_S)
    return found


def _by_number(
    group: ComparedGroup, rewards: Sequence[NDArray[np.float64]], *, scale: Scale, baseline: Baseline
) -> NDArray[np.float64]:
    """Compare the k-th of each trajectory's rewards with the k-th of the others that have one: (G, most). 0:
    there is none. NaN: none."""
    rewards_GK = np.full((len(rewards), max(map(len, rewards))), np.nan)
    for rewards_K, own in zip(rewards_GK, rewards, strict=True):
        rewards_K[: len(own)] = own
    own_GK = np.zeros(rewards_GK.shape)
    for rewards_G, own_G in zip(rewards_GK.T, own_GK.T, strict=True):
        has_G = ~np.isnan(rewards_G)
        if has_G.any():
            rewarded = replace(group, rewards_G=rewards_G[has_G])
            own_G[has_G] = group_advantages(rewarded, scale=scale, baseline=baseline)
    return own_GK


# ---------------------------------------------------------------- a critic


@dataclass(frozen=True, slots=True)
class Critic:
    """A linear head on the trained model that predicts the return from before each token.

    loss   (xp, values_N, before_N, returns_N) -> (N,); `before_N`: the values at the batch's beginning
    lr     the head's learning rate
    trunk  how much of the gradient of the loss goes on into the model; 0: the head alone learns
    """

    loss: Callable[..., Any]
    lr: float
    trunk: float = 0.0


def value_loss(xp: Namespace, values_N: Any, before_N: Any, returns_N: Any, *, clip: float | None) -> Any:
    """Half the squared error of each value.

        L = 1/2 max((V - R)^2, (V_clip - R)^2),   V_clip = V_before + clip(V - V_before, -clip, clip)

    Shapes:
        values_N, before_N, returns_N  (N,); the last two are constants. R = A + V_before, A of GAE
    Degenerate:
        clip None, or the first optimizer step of a batch -> the plain squared error.
    Source:
        PPO, arXiv:1707.06347, equation 9; the clip is of its authors' code (see arXiv:2006.05990, which finds
        no gain in it).
    """
    error_N = (values_N - returns_N) ** 2
    if clip is not None:
        near_N = before_N + xp.clip(values_N - before_N, -clip, clip)
        error_N = xp.maximum(error_N, (near_N - returns_N) ** 2)
    return error_N / 2.0


def value_advantages(group: ComparedGroup, *, discount: float, gae_lambda: float) -> list[NDArray[Any]]:
    """Compare each token with what the critic expected before it.

        A_t = sum over k >= 0 of (discount gae_lambda)^k delta_(t + k)
        delta_t = r_t + discount V_(t + 1) - V_t

    The reward comes with the last trained token, and V is 0 after it, also where the trajectory was cut by a
    budget. Tokens that the policy did not sample are no steps.

    Shapes:
        returns  for each trajectory (length,): 0 where no token is trained
    Raises:
        DataError: the group has no values.
    Degenerate:
        gae_lambda 1, discount 1: A_t is the reward less V_t.
    Source:
        GAE, arXiv:1506.02438, equation 16, as in PPO, arXiv:1707.06347, equation 11.
    """
    if group.values is None:
        raise DataError("an advantage by a critic needs its values, and the group has none")
    found = []
    for reward, values in zip(group.rewards_G, group.values, strict=True):
        at_T = np.flatnonzero(~np.isnan(values))
        advantages = np.zeros(len(values))
        advantages[at_T] = _gae(values[at_T], reward, discount, gae_lambda)
        found.append(advantages)
    return found


def _gae(values_T: NDArray[Any], reward: float, discount: float, gae_lambda: float) -> NDArray[Any]:
    if not values_T.size:
        return values_T
    delta_T = discount * np.append(values_T[1:], 0.0) - values_T
    delta_T[-1] += reward
    advantages_T = np.empty(values_T.size)
    after = 0.0
    for t in range(values_T.size - 1, -1, -1):
        after = delta_T[t] + discount * gae_lambda * after
        advantages_T[t] = after
    return advantages_T
