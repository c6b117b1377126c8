"""Advantages: how good a trajectory was, compared with the others of its group.

Plain functions on plain arrays (numpy, float64). Shape suffix: G = trajectories of one group.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.core.errors import DataError

EPS = 1e-6  # keeps a group of equal rewards at zero instead of 0 / 0

Scale = Literal["std", "none"]


def group_advantages(rewards_G: ArrayLike, *, scale: Scale) -> NDArray[Any]:
    """Center rewards within one group.

        A_i = (r_i - mean(r)) / d,   d = std(r) + EPS  |  1

    Shapes:
        rewards_G  (G,) one return per trajectory, unitless
        returns    (G,) sums to 0 up to rounding
    Raises:
        DataError: G < 2 (a single trajectory has no baseline), or a reward that is not finite.
    Degenerate:
        All rewards equal -> all zeros: the group teaches nothing.
    Source:
        GRPO, arXiv:2402.03300, section 4.1.2 (`scale="std"`; the paper leaves the estimator open,
        we take the population one); Dr. GRPO, arXiv:2503.20783 and AIPO, arXiv:2505.24034
        (`scale="none"`).
    """
    rewards = _checked(rewards_G)
    centered = rewards - rewards.mean()
    return centered / (rewards.std() + EPS) if scale == "std" else centered


def leave_one_out_advantages(rewards_G: ArrayLike) -> NDArray[Any]:
    """Compare each trajectory with the mean of the others.

        A_i = r_i - mean(r_j, j != i) = (r_i - mean(r)) * G / (G - 1)

    Shapes:
        rewards_G  (G,) one return per trajectory, unitless
        returns    (G,) sums to 0 up to rounding
    Raises:
        DataError: G < 2, or a reward that is not finite.
    Degenerate:
        All rewards equal -> all zeros.
    Source:
        RLOO, arXiv:2402.14740, equation 8: an unbiased baseline.
    """
    rewards = _checked(rewards_G)
    return (rewards - rewards.mean()) * (rewards.size / (rewards.size - 1))


def _checked(rewards_G: ArrayLike) -> NDArray[Any]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size < 2:
        raise DataError(f"a group needs at least 2 rewards in one row to compare, got shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise DataError(f"rewards of a group must be finite, got {rewards.tolist()}")
    return rewards
