"""Intervals of 95 % for the mean of a sample of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""95 % of a normal distribution lies within so many standard deviations."""

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)

Interval = tuple[float, float]


def t_975(freedom: int) -> float:
    """Student's t for `freedom` degrees: 95 % lies within so many standard errors.

    From a table, then from the series in 1 / freedom of Abramowitz and Stegun, 26.7.5, to within 0.0005.
    """
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    g1, g2 = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    g3 = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3


def of_shares(values: Sequence[float]) -> Interval:
    """The interval of the mean of values in [0, 1], one for each prompt.

        (m + t^2 / 2n -+ t sqrt(m (1 - m) / n + t^2 / 4n^2)) / (1 + t^2 / n)

    Of all distributions on [0, 1] with mean m, the distribution on 0 and 1 alone has the largest variance,
    m (1 - m). So the interval is wide enough for values between 0 and 1, such as pass@k of a prompt.

    Degenerate:
        No values -> (nan, nan). One -> (0, 1).
    Source:
        Wilson, J. Am. Stat. Assoc. 22 (1927), the score interval. There t is a quantile of the normal
        distribution, with which fewer than 95 % of the intervals of few prompts hold the mean.
    """
    n = len(values)
    if n < 2:
        return (0.0, 1.0) if n else (math.nan, math.nan)
    return _score_interval(math.fsum(values) / n, n, t_975(n - 1))


def of_attempts(correct: int, n: int) -> Interval:
    """Wilson's score interval of a pass rate: `correct` of `n` independent attempts at one prompt.

    Each attempt is right or wrong, so the variance follows from the rate. So t is the normal quantile here.

    Degenerate:
        No attempts -> (0, 1).
    """
    return _score_interval(correct / n, n, Z) if n else (0.0, 1.0)


def _score_interval(mean: float, n: int, t: float) -> Interval:
    square = t * t
    center = (mean + square / (2 * n)) / (1 + square / n)
    half = t * math.sqrt(max(0.0, mean * (1 - mean)) / n + square / (4 * n * n)) / (1 + square / n)
    return max(0.0, center - half), min(1.0, center + half)


def of_mean(values: Sequence[float]) -> Interval:
    """The interval of the mean of any values, one for each prompt: the mean -+ t standard errors.

    Degenerate:
        Fewer than two values -> (nan, nan).
    """
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    mean, error = math.fsum(values) / n, standard_error(values)
    return mean - t_975(n - 1) * error, mean + t_975(n - 1) * error


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean: sqrt(sum (x - mean)^2 / (n - 1) / n).

    Degenerate:
        Fewer than two values -> nan.
    """
    n = len(values)
    if n < 2:
        return math.nan
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
