"""How fresh and how fair a run's batches are, over a window of the last ones. Pure.

A group's *length* is the mean number of tokens of its trained completions. A batch is a fair sample if, by
their lengths, its groups are a random choice among the groups of the window. A schedule that trains the first
ready groups trains short groups together and long groups together, and is not fair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, pstdev

BATCHES = 32
"""Batches of a window. In it, the fairness of random batches has a standard error of sqrt(2 / 31) = 0.25.
Lengths drift with training, so a longer window would measure the drift."""

BATCHES_MIN = 16
"""Fewer batches have no figures: the standard error would be above sqrt(2 / 15) = 0.37."""

BAND = 0.5, 1.3
"""Fairness of batches that are fair samples, for people and for `doctor`."""

EVEN = 1e-9
"""Lengths that differ by less than this share of their mean count as equal."""


@dataclass(frozen=True, slots=True)
class LengthMoments:
    """The lengths of one batch's groups: how many, their mean and their (population) standard deviation."""

    groups: int
    mean: float
    std: float

    @classmethod
    def of(cls, lengths: Sequence[float]) -> LengthMoments:
        """Raises StatisticsError: `lengths` is empty."""
        return cls(len(lengths), fmean(lengths), pstdev(lengths))


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a window. None: the window has fewer than `BATCHES_MIN` batches, or equal lengths.

    `staleness_mean` is over trained tokens, in versions. `next` is the `next_correlation`.
    """

    batches: int
    staleness_mean: float | None = None
    fairness: float | None = None
    next: float | None = None


def fairness(batches: Sequence[LengthMoments]) -> float | None:
    """The variance of lengths between batches, over what random batches of the same groups would have.

        fairness = [sum_b n_b (m_b - m)^2 / (B - 1)]  /  [sum_g (x_g - m)^2 / (N - 1)]

    n_b, m_b: groups and mean length of batch b; B: batches; x_g: length of a group; N: groups; m: their mean.
    The mean of a random batch of n_b out of N groups has the variance (1 - n_b / N) / n_b times the lower
    bracket. Multiplied by n_b and summed over batches, this gives B - 1 times the bracket. So the mean over
    all divisions into such batches is exactly 1.

    1: fair samples, with a standard error of sqrt(2 / (B - 1)) for many groups a batch. 0: every batch has
    the same mean. n_b: every batch holds groups of one length.
    Degenerate:
        Fewer than two batches, or equal lengths -> None.
    """
    num = sum(batch.groups for batch in batches)
    if len(batches) < 2:
        return None
    mean = sum(batch.groups * batch.mean for batch in batches) / num
    between = sum(batch.groups * (batch.mean - mean) ** 2 for batch in batches)
    within = sum(batch.groups * batch.std**2 for batch in batches)
    variance = (between + within) / (num - 1)
    if sqrt(variance) <= EVEN * abs(mean):
        return None
    return between / (len(batches) - 1) / variance


def next_correlation(batches: Sequence[LengthMoments]) -> float | None:
    """Pearson's correlation of the mean lengths of neighbouring batches: -1 where short and long alternate.

    Random batches give -1 / B on average. None: fewer than three batches, or equal means.
    """
    pairs = list(pairwise(batch.mean for batch in batches))
    if len(pairs) < 2:
        return None
    before, after = (fmean(side) for side in zip(*pairs, strict=True))
    product = sum((a - before) * (b - after) for a, b in pairs)
    squares = sum((a - before) ** 2 for a, _ in pairs) * sum((b - after) ** 2 for _, b in pairs)
    if squares <= (EVEN * before * after) ** 2:
        return None
    return product / sqrt(squares)


def windows(batches: Sequence[LengthMoments]) -> list[Sequence[LengthMoments]]:
    """Windows of exactly `BATCHES` batches, the last one first. The mean of their figures is for a long run:
    in one long window the drift of lengths with training would count as unfair."""
    return [batches[end - BATCHES : end] for end in range(len(batches), BATCHES - 1, -BATCHES)]


class Window:
    """The last batches of a run.

    A repeated batch counts once. A resumed run begins a new window, with figures after `BATCHES_MIN` batches.
    """

    def __init__(self, batches: int = BATCHES) -> None:
        self._lengths = deque[LengthMoments](maxlen=batches)
        self._staleness = deque[tuple[int, int]](maxlen=batches)  # tokens, and the sum of their staleness
        self._version = -1

    def add(self, version: int, lengths: LengthMoments, staleness: Mapping[int, int]) -> None:
        """The batch that made `version`; `staleness` counts its trained tokens by staleness."""
        if version <= self._version:
            return
        self._version = version
        self._lengths.append(lengths)
        self._staleness.append((sum(staleness.values()), sum(s * n for s, n in staleness.items())))

    def figures(self) -> Figures:
        batches = len(self._lengths)
        if batches < BATCHES_MIN:
            return Figures(batches)
        lengths = list(self._lengths)
        tokens, stale = (sum(side) for side in zip(*self._staleness, strict=True))
        return Figures(
            batches, stale / tokens if tokens else None, fairness(lengths), next_correlation(lengths)
        )
