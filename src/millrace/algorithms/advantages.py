"""Advantages: how good a trajectory was, compared with the others of its group.

Pure functions of a `Group` (numpy, float64). Shape suffix: G = trajectories of one group.
"""

from __future__ import annotations

from typing import Any, Literal

from numpy.typing import NDArray

from millrace.algorithms.group import Group

EPS = 1e-6  # keeps a group of equal rewards at zero instead of 0 / 0

Scale = Literal["std", "none"]


def group_advantages(group: Group, *, scale: Scale) -> NDArray[Any]:
    """Center rewards within one group.

        A_i = (r_i - mean(r)) / d,   d = std(r) + EPS  |  1

    Shapes:
        returns  (G,) sums to 0 up to rounding
    Degenerate:
        All rewards equal -> all zeros: the group teaches nothing.
    Source:
        GRPO, arXiv:2402.03300, section 4.1.2 (`scale="std"`; the paper leaves the estimator open,
        we take the population one); Dr. GRPO, arXiv:2503.20783 and AIPO, arXiv:2505.24034
        (`scale="none"`).
    """
    rewards = group.rewards_G
    centered = rewards - rewards.mean()
    return centered / (rewards.std() + EPS) if scale == "std" else centered


def leave_one_out_advantages(group: Group) -> NDArray[Any]:
    """Compare each trajectory with the mean of the others.

        A_i = r_i - mean(r_j, j != i) = (r_i - mean(r)) * G / (G - 1)

    Shapes:
        returns  (G,) sums to 0 up to rounding
    Degenerate:
        All rewards equal -> all zeros.
    Source:
        RLOO, arXiv:2402.14740, equation 8: an unbiased baseline.
    """
    rewards = group.rewards_G
    return (rewards - rewards.mean()) * (rewards.size / (rewards.size - 1))
