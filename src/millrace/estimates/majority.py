"""Majority@k: how often the most frequent of k answers is correct, from n answers drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb

from millrace.core.errors import DataError

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
