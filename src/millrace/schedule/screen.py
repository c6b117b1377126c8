"""Screen: does the rest of a group start, once its first trajectories have rewards?

A group starts with its first n trajectories. If their rewards are all equal, the rest would most likely get
the same reward, and a group of equal rewards teaches nothing. So the rest never starts.

Source: SPEED-RL, arXiv:2506.09016. There and here a group is trained with its first trajectories too.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.errors import DataError
from millrace.core.rounding import all_equal

SCREENED_MAX = 1000  # groups in a row that are screened out, until the run ends


def screened_reward(rewards: Sequence[float]) -> float | None:
    """The reward for which a group is screened out; None: its rest starts.

    `rewards` of those first trajectories that have one: a failure is not 0. One reward alone says nothing.
    """
    return rewards[0] if len(rewards) > 1 and all_equal(rewards) else None


def refuse_endless(in_a_row: int, row_id: str, why: str) -> None:
    """Raises: DataError: so many groups in a row were screened out, the last of `row_id`, that no end is in
    sight."""
    if in_a_row >= SCREENED_MAX:
        raise DataError(
            f"{in_a_row} groups in a row were screened out; the last, {row_id}: {why}\n"
            "  The task is learned, or too hard. To go on all the same, set `batch.screen_samples` to 0."
        )
