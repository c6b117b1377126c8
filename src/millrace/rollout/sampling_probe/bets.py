"""How sure chance can be excluded. Every bound holds for any distribution and any number of draws.

A bet against a claimed distribution p names other probabilities q before each draw, and multiplies its
capital by q(x) / p(x) for the token x that is drawn. If tokens are drawn from p, the expected capital stays
at most 1. So it reaches 1 / a with a probability of at most a (Ville's inequality; Shafer, 2021, "Testing by
betting"). Capital is given as its natural logarithm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Draw = tuple[int, float]
"""A sampled token, and its log-prob as the engine says."""

_PRIOR = 4.0  # draws after which a bet on repeats trusts what it has seen as much as the claim

_RATIO_MAX = 700.0  # the exponential of more is no float


def repeats(draws: Sequence[Draw]) -> float:
    """The capital of a bet that the tokens so far come again, more often than p says."""
    seen, capital = Counter[int](), 0.0
    for number, (token, logprob) in enumerate(draws):
        weight = number / (number + _PRIOR)
        share = math.log(seen[token] / number) if seen[token] else -math.inf
        capital += _stake(weight, share, logprob)
        seen[token] += 1
    return capital


def rival(draws: Sequence[Draw], rival_logprobs: Sequence[float]) -> float:
    """The capital of a bet on a distribution in which the draws have these log-probs."""
    pairs = zip(draws, rival_logprobs, strict=True)
    return sum(_stake(0.5, rival_logprob, logprob) for (_, logprob), rival_logprob in pairs)


def _stake(weight: float, rival_logprob: float, logprob: float) -> float:
    """The growth of the capital when `weight` of it is bet on the rival and the rest on p."""
    return math.log(weight * math.exp(min(rival_logprob - logprob, _RATIO_MAX)) + 1.0 - weight)


def too_many(misses: int, trials: int, rate: float, chance: float) -> bool:
    """Whether `misses` of `trials` have at most this `chance` if each has a probability of at most `rate`.
    By Chernoff's bound: exp(-trials * KL(misses / trials || rate))."""
    share = misses / trials
    if share <= rate:
        return False
    distance = share * math.log(share / rate)
    distance += (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
    return trials * distance >= -math.log(chance)
