"""Intervals of 95 % for the mean of a sample of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""Of a normal distribution, 95 % lies within this many standard deviations."""

Interval = tuple[float, float]


def of_shares(values: Sequence[float]) -> Interval:
    """Of the mean of values in [0, 1], one for each prompt.

        (m + z^2 / 2n -+ z sqrt(m (1 - m) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Of all distributions on [0, 1] with mean m, that of 0 and 1 alone has the largest variance, m (1 - m). So
    for values between 0 and 1, such as pass@k of a prompt, the interval is wide enough, and never too narrow.

    Degenerate:
        No values -> (nan, nan).
    Source:
        Wilson, J. Am. Stat. Assoc. 22 (1927), the score interval.
    """
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean, square = math.fsum(values) / n, Z * Z
    center = (mean + square / (2 * n)) / (1 + square / n)
    half = Z * math.sqrt(max(0.0, mean * (1 - mean)) / n + square / (4 * n * n)) / (1 + square / n)
    return max(0.0, center - half), min(1.0, center + half)


def of_mean(values: Sequence[float]) -> Interval:
    """Of the mean of any values, one for each prompt: the mean -+ z standard errors.

    Degenerate:
        Fewer than two values -> (nan, nan).
    """
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return mean - Z * error, mean + Z * error
