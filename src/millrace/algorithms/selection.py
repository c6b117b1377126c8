"""Which trajectories of a group are compared and trained. Shape suffix: G = trajectories of one group."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.group import ComparedGroup
from millrace.core.rounding import ABSOLUTE


def selected(group: ComparedGroup, *, select: str, keep: int | None) -> NDArray[np.bool_]:
    """
        all        every one
        shortest   the `keep` with the fewest tokens
        efficient  the `keep` with the most reward per token
        positive   those with a reward above 0, by more than rounding

    Among equals the earlier one is kept. Trajectories that are left out are no part of the baseline, and
    count nowhere in the loss.

    Source:
        GFPO, arXiv:2508.09726, section 3 (shortest, efficient: sample more, train on the concise). RAFT,
        arXiv:2304.06767, as in arXiv:2504.11343 (positive: imitate what was rewarded).
    """
    match select:
        case "shortest":
            return _first(group.lengths_G, keep)
        case "efficient":
            return _first(-group.rewards_G / np.maximum(group.lengths_G, 1), keep)
        case "positive":
            return group.rewards_G > ABSOLUTE
        case _:
            return np.ones(group.rewards_G.size, bool)


def _first(cost_G: NDArray[Any], keep: int | None) -> NDArray[np.bool_]:
    kept = np.zeros(cost_G.size, bool)
    kept[np.argsort(cost_G, kind="stable")[:keep]] = True
    return kept
