"""What an evaluation reports, from the scores of greedy and of sampled completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace.core.types import Score, Scored
from millrace.evaluation.pass_at_k import mean_pass_at_k


@dataclass(frozen=True)
class Attempt:
    """One completion of a prompt and what became of it."""

    score: Score
    truncated: bool

    @property
    def reward(self) -> float | None:
        """None: the reward failed or abstained, which is not a zero."""
        return self.score.value if isinstance(self.score, Scored) else None


@dataclass(frozen=True)
class Evaluation:
    """Shares are in [0, 1]. Completions without a reward are left out of every mean, and counted.

    `pass_at_k` is over prompts with at least k scored samples.
    """

    model: str
    num_prompts: int
    num_samples: int
    correct_at: float
    greedy_accuracy: float
    sampled_accuracy: float
    pass_at_k: dict[int, float]
    reward_mean: float
    truncated_share: float
    num_unscored: int

    def to_json(self) -> dict[str, Any]:
        """JSON types; a mean of nothing is null."""
        passes = {str(k): _null_for_nan(value) for k, value in self.pass_at_k.items()}
        return {key: _null_for_nan(value) for key, value in asdict(self).items()} | {"pass_at_k": passes}


def summarize(
    model: str, greedy: Sequence[Attempt], sampled: Sequence[Sequence[Attempt]], *, correct_at: float
) -> Evaluation:
    """`greedy` has one attempt per prompt, `sampled` a row per prompt. A reward of at least
    `correct_at` is correct."""
    rewards = [[a.reward for a in row if a.reward is not None] for row in sampled]
    everything = [*greedy, *(attempt for row in sampled for attempt in row)]
    samples = max((len(row) for row in sampled), default=0)
    return Evaluation(
        model=model,
        num_prompts=len(greedy),
        num_samples=samples,
        correct_at=correct_at,
        greedy_accuracy=_share([a.reward for a in greedy if a.reward is not None], correct_at),
        sampled_accuracy=_share([reward for row in rewards for reward in row], correct_at),
        pass_at_k={k: _pass_at_k(rewards, k, correct_at) for k in powers_of_two(samples)},
        reward_mean=_mean([reward for row in rewards for reward in row]),
        truncated_share=_mean([float(attempt.truncated) for attempt in everything]),
        num_unscored=sum(attempt.reward is None for attempt in everything),
    )


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and `limit` itself."""
    return sorted({2**i for i in range(limit.bit_length()) if 2**i <= limit} | ({limit} if limit else set()))


def _pass_at_k(rewards: Sequence[Sequence[float]], k: int, correct_at: float) -> float:
    rows = [row for row in rewards if len(row) >= k]
    by_size = {n: [row for row in rows if len(row) == n] for n in {len(row) for row in rows}}
    total = math.fsum(
        len(same) * mean_pass_at_k([sum(r >= correct_at for r in row) for row in same], n, k)
        for n, same in by_size.items()
    )
    return total / len(rows) if rows else math.nan


def _null_for_nan(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _share(rewards: Sequence[float], correct_at: float) -> float:
    return _mean([float(reward >= correct_at) for reward in rewards])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
