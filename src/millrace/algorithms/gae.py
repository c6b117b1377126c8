"""Advantages from the values of a critic: GAE. Shape suffix: T = trained tokens of one trajectory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.group import ComparedGroup
from millrace.core.errors import DataError


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
