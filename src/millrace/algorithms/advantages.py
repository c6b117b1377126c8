"""Advantages: how good a trajectory was, compared with the others of its group.

Pure functions (numpy, float64). Shape suffixes: G = trajectories of one group, N = trained tokens of a batch.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.group import ComparedGroup
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
