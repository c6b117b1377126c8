"""A penalty for completions that come near the budget. Shape suffix: G = trajectories of one group."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.group import ComparedGroup


def overlong_penalty(group: ComparedGroup, *, fraction: float) -> NDArray[Any]:
    """What is taken off a reward.

        c = fraction * max_tokens;   penalty = clip((length - (max_tokens - c)) / c, 0, 1)

    0 up to c tokens before the budget, then rising to 1 at the budget. Lengths are those of sampled tokens.

    Source:
        DAPO, arXiv:2503.14476, equation 13 (c is 4096 of 20480 tokens there: 0.2).
    """
    cache = fraction * group.max_tokens
    if cache == 0:
        return np.zeros(group.rewards_G.size)
    return np.clip((group.trained_G - (group.max_tokens - cache)) / cache, 0.0, 1.0)
