"""The figures of an evaluation, from the scores of greedy and sampled completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from millrace.core.rounding import reaches
from millrace.core.types import Score, Scored
from millrace.estimates.interval import Interval, of_mean, of_shares
from millrace.estimates.majority import Answers, classes, majority_at_k
from millrace.estimates.pass_at_k import pass_at_k


@dataclass(frozen=True)
class Attempt:
    """One completion of a prompt and its score."""

    score: Score
    truncated: bool

    @property
    def reward(self) -> float | None:
        """None if the reward failed or abstained, which is not a reward of 0."""
        return self.score.value if isinstance(self.score, Scored) else None

    @property
    def answer(self) -> str | None:
        """The answer of the completion; None if the request did not ask for answers."""
        return self.score.answer if isinstance(self.score, Scored) else None


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Shares are in [0, 1]. Completions without a reward are left out of every
    mean, and counted. All prompts with a reward have equal weight.

    `pass_at_k` and `majority_at_k` are over prompts with at least k scored samples. `intervals` are of 95 %,
    over prompts, by the names of the other fields: `greedy_accuracy`, `pass_at_k.4`, `reward_mean`.
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
    majority_at_k: dict[int, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The evaluation as JSON types. A mean of no values is null."""
        tree: dict[str, Any] = _json(asdict(self))
        return tree

    @classmethod
    def of_json(cls, tree: Mapping[str, Any]) -> Evaluation:
        """The reverse of `to_json`."""
        read: dict[str, Any] = {name: _number(value) for name, value in tree.items()}
        for name in ("pass_at_k", "majority_at_k"):
            read[name] = {int(k): _number(value) for k, value in tree[name].items()}
        read["intervals"] = {n: (_number(low), _number(high)) for n, (low, high) in tree["intervals"].items()}
        return cls(**read)


def summarize(
    model: str, greedy: Sequence[Attempt], sampled: Sequence[Sequence[Attempt]], *, correct_at: float
) -> Evaluation:
    """`greedy` has one attempt per prompt, `sampled` a row per prompt. A reward of at least `correct_at` is
    correct. Majorities are counted if the answers of completions are known. An empty answer has no vote."""
    rows = [[a for a in row if a.reward is not None] for row in sampled]
    rewards = [[a.reward for a in row if a.reward is not None] for row in rows]
    correct = [[reaches(reward, correct_at) for reward in row] for row in rewards]
    everything = [*greedy, *(attempt for row in sampled for attempt in row)]
    samples = max((len(row) for row in sampled), default=0)
    voting = [
        (_votes(row, right), len(row))
        for row, right in zip(rows, correct, strict=True)
        if row and all(a.answer is not None for a in row)
    ]
    values = {
        "greedy_accuracy": [float(reaches(a.reward, correct_at)) for a in greedy if a.reward is not None],
        "sampled_accuracy": [_mean(list(map(float, row))) for row in correct if row],
        "reward_mean": [_mean(row) for row in rewards if row],
    }
    passes = {
        k: [pass_at_k(len(row), sum(row), k) for row in correct if len(row) >= k]
        for k in powers_of_two(samples)
    }
    votes = {
        k: [majority_at_k(row, k, size - sum(num for num, _ in row)) for row, size in voting if size >= k]
        for k in powers_of_two(samples)
        if voting
    }
    return Evaluation(
        model=model,
        num_prompts=len(greedy),
        num_samples=samples,
        correct_at=correct_at,
        **{name: _mean(each) for name, each in values.items()},
        pass_at_k={k: _mean(each) for k, each in passes.items()},
        truncated_share=_mean([float(attempt.truncated) for attempt in everything]),
        num_unscored=sum(attempt.reward is None for attempt in everything),
        majority_at_k={k: _mean(each) for k, each in votes.items()},
        intervals=_intervals(values, passes, votes),
    )


def figure(tree: Mapping[str, Any], by: str) -> float | None:
    """The figure of an evaluation that `by` of `[[evaluations]]` names. None: it could not be measured."""
    match by:
        case "pass" | "majority":
            return tree[f"{by}_at_k"].get(str(tree["num_samples"]))
        case "reward":
            return tree["reward_mean"]
    return tree[f"{by}_accuracy"]


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and `limit` itself."""
    return sorted({2**i for i in range(limit.bit_length()) if 2**i <= limit} | ({limit} if limit else set()))


def _votes(row: Sequence[Attempt], correct: Sequence[bool]) -> Answers:
    """The answers of a prompt. An empty answer counts as none."""
    answered = [(a.answer, right) for a, right in zip(row, correct, strict=True) if a.answer]
    return classes([answer for answer, _ in answered], [right for _, right in answered])


def _intervals(
    values: Mapping[str, Sequence[float]],
    passes: Mapping[int, Sequence[float]],
    votes: Mapping[int, Sequence[float]],
) -> dict[str, Interval]:
    named = dict(values)
    named |= {f"pass_at_k.{k}": each for k, each in passes.items()}
    named |= {f"majority_at_k.{k}": each for k, each in votes.items()}

    def kind(name: str) -> Callable[[Sequence[float]], Interval]:
        return of_mean if name == "reward_mean" else of_shares

    return {name: kind(name)(each) for name, each in named.items() if each}


def _json(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _json(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_json(inner) for inner in value]
        case float() if not math.isfinite(value):
            return None
    return value


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
