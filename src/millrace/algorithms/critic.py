"""What a critic learns, and advantages from its values.

Shape suffixes: N = tokens, T = trained tokens of one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.group import ComparedGroup
from millrace.algorithms.logprobs import Namespace
from millrace.core.errors import DataError


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
