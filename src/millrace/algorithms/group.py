"""One group: what an advantage may look at, what it costs to be too long, and who is compared.

Shape suffix: G = trajectories of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.core.errors import DataError
from millrace.core.rounding import ABSOLUTE


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """Trajectories of one prompt, compared with each other. Plain numpy, in order of the batch.

    rewards_G    one return per trajectory, unitless
    lengths_G    tokens of the completion, observed ones too
    trained_G    of these, tokens that the policy sampled and that are trained
    truncated_G  cut by a budget
    turns_G      stretches of sampled tokens: 1 without an environment that answers
    turn_of      of each completion the turn of each token, from 0; -1: it is not trained
    sequence_of  of each completion the sequence of each token, from 0: 0 of all without forks
    max_tokens   the budget of a completion
    values       of each completion the critic's value before each token, NaN where none is trained; None:
                 there is no critic
    turn_rewards of each completion those of its turns, NaN where a turn has none; None: no turn has any
    """

    rewards_G: NDArray[np.float64]
    lengths_G: NDArray[np.int64]
    trained_G: NDArray[np.int64]
    truncated_G: NDArray[np.bool_]
    turns_G: NDArray[np.int64]
    turn_of: Sequence[NDArray[np.int64]]
    sequence_of: Sequence[NDArray[np.int64]]
    max_tokens: int = 0
    values: Sequence[NDArray[np.float64]] | None = None
    turn_rewards: Sequence[NDArray[np.float64]] | None = None

    @staticmethod
    def of(
        rewards: ArrayLike,
        masks: Sequence[ArrayLike] | None = None,
        truncated: ArrayLike = False,
        max_tokens: int = 0,
        values: Sequence[NDArray[np.float64]] | None = None,
        turn_rewards: Sequence[NDArray[np.float64]] | None = None,
    ) -> ComparedGroup:
        """`masks`: of each completion, which tokens are trained; None: one trained token each.

        Raises: DataError: rewards that are not one finite number per trajectory.
        """
        rewards_G = np.asarray(rewards, dtype=np.float64)
        if rewards_G.ndim != 1 or rewards_G.size < 2:
            raise DataError(
                f"a group needs at least 2 rewards in one row to compare, got shape {rewards_G.shape}"
            )
        if not np.isfinite(rewards_G).all():
            raise DataError(f"rewards of a group must be finite, got {rewards_G.tolist()}")
        every = [np.asarray(mask, dtype=bool) for mask in masks or [[True]] * rewards_G.size]
        turn_of = [turns_of(mask) for mask in every]
        return ComparedGroup(
            rewards_G,
            lengths_G=np.asarray([mask.size for mask in every], dtype=np.int64),
            trained_G=np.asarray([mask.sum() for mask in every]),
            truncated_G=np.broadcast_to(np.asarray(truncated, dtype=bool), rewards_G.shape),
            turns_G=np.asarray([turns.max(initial=-1) + 1 for turns in turn_of]),
            turn_of=turn_of,
            sequence_of=[np.zeros(mask.size, int) for mask in every],
            max_tokens=max_tokens,
            values=values,
            turn_rewards=turn_rewards,
        )

    def part(self, kept_G: NDArray[np.bool_]) -> ComparedGroup:
        """The group without some of its trajectories."""

        def kept(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return value[kept_G]
            return list(compress(value, kept_G)) if isinstance(value, Sequence) else value

        return ComparedGroup(**{field.name: kept(getattr(self, field.name)) for field in fields(self)})

    def minus(self, penalty_G: NDArray[np.float64]) -> ComparedGroup:
        """The group with something taken off its rewards."""
        return replace(self, rewards_G=self.rewards_G - penalty_G)


def turns_of(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Of each token the turn, a stretch of the mask; -1 outside of it."""
    begins = mask.copy()
    begins[1:] &= ~mask[:-1]
    return np.where(mask, begins.cumsum() - 1, -1)


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
