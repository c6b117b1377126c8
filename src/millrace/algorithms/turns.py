"""Credit for parts of a trajectory: its turns, or its sequences.

Shape suffixes: G = trajectories of one group; K = turns, S = sequences, T = tokens of one trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.advantages import Baseline, Scale, group_advantages
from millrace.algorithms.group import ComparedGroup


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
