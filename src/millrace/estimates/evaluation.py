"""The figures of an evaluation, from the scores of greedy and sampled completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import comb
from typing import Any

from millrace.core.errors import DataError
from millrace.core.rounding import reaches
from millrace.core.types import Score, Scored
from millrace.estimates.interval import Interval, of_mean, of_shares


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


Answers = tuple[tuple[int, float], ...]
"""For each distinct answer: the number of its completions, and the share of them that is correct."""


def classes(answers: Sequence[str], correct: Sequence[bool]) -> Answers:
    """The distinct answers, in an order that depends on their counts alone."""
    by_answer: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        by_answer.setdefault(answer, []).append(right)
    return tuple(sorted(((len(each), sum(each) / len(each)) for each in by_answer.values()), reverse=True))


@lru_cache(maxsize=4096)
def majority_at_k(answers: Answers, k: int, silent: int = 0) -> float:
    """Probability that the most frequent of k answers is correct. If several answers are the most frequent,
    the mean of their shares counts. `silent` completions have no answer: they are drawn too, and have no
    vote.

    The estimate is the mean over all C(n, k) choices of k completions, so it is unbiased. It is summed over
    the highest count t: in x^k of the product over the answers i of

        sum_{u<t} C(c_i, u) x^u  +  y C(c_i, t) x^t

    times the sum over u of C(silent, u) x^u, the power of y is the number of winners. Each coefficient has
    a second number, the sum of the winners' shares.

    Raises:
        DataError: not 1 <= k <= n.
    Degenerate:
        k = 1 -> the share of completions with a correct answer. No answer among the k -> not correct.
    Source:
        Self-consistency, arXiv:2203.11171; unbiased as pass@k is, arXiv:2107.03374.
    """
    n = silent + sum(count for count, _ in answers)
    if not 1 <= k <= n:
        raise DataError(f"majority@k needs 1 <= k <= n, got n={n}, k={k}")
    most = max((count for count, _ in answers), default=0)
    return sum(_won_with(answers, k, t, silent) for t in range(1, min(most, k) + 1)) / comb(n, k)


def _won_with(answers: Answers, k: int, t: int, silent: int) -> float:
    """The number of choices whose highest count is `t`, weighed by the winners' mean share."""
    states: dict[tuple[int, int], tuple[float, float]]  # (taken, winners)
    states = {(taken, 0): (float(comb(silent, taken)), 0.0) for taken in range(min(silent, k) + 1)}
    for count, share in answers:
        grown: dict[tuple[int, int], tuple[float, float]] = {}
        for (taken, winners), (number, shares) in states.items():
            for more in range(min(t, count, k - taken) + 1):
                wins, times = more == t, comb(count, more)
                key = taken + more, winners + wins
                before = grown.get(key, (0.0, 0.0))
                gained = shares + (share * number if wins else 0.0)
                grown[key] = before[0] + times * number, before[1] + times * gained
        states = grown
    return sum(shares / winners for (taken, winners), (_, shares) in states.items() if taken == k and winners)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k completions is correct, from n drawn of which c are.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n-c+1}^{n} (1 - k / i)

    Raises:
        DataError: not 0 <= c <= n or not 1 <= k <= n.
    Degenerate:
        Fewer than k wrong completions -> 1.
    Source:
        Chen et al., arXiv:2107.03374, equation 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise DataError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
