"""Credit for each turn of a trajectory. Shape suffixes: G = trajectories of one group, K = turns of one."""

from __future__ import annotations

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
    told_GK = _table(group)
    own_GK = np.zeros(told_GK.shape)
    for told_G, own_G in zip(told_GK.T, own_GK.T, strict=True):
        has_G = ~np.isnan(told_G)
        if has_G.any():
            rewarded = replace(group, rewards_G=told_G[has_G])
            own_G[has_G] = group_advantages(rewarded, scale=scale, baseline=baseline)
    found = []
    for outcome, own_K, turns, turn_T in zip(outcome_G, own_GK, group.turns_G, group.turn_of, strict=True):
        advantages_K = own_K[:turns].copy()
        advantages_K[-1:] += outcome
        for later, k in pairwise(range(turns - 1, -1, -1)):
            advantages_K[k] += discount * advantages_K[later]
        found.append(np.append(advantages_K, 0.0)[turn_T])
    return found


def _table(group: ComparedGroup) -> NDArray[np.float64]:
    """Rewards of turns, (G, most turns); NaN: none."""
    told_GK = np.full((group.rewards_G.size, max(group.turns_G.max(), 1)), np.nan)
    for told_K, rewards in zip(told_GK, group.turn_rewards or (), strict=False):
        told_K[: len(rewards)] = rewards
    return told_GK
