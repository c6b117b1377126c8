"""Rewards that are equal but for rounding are equal: 0.1 + 0.2 and 0.3.

Rewards are sums of weighted parts, some of them computed in float32. So numbers that are meant to be equal
differ by a few units of the last place, and dividing by their deviation would make a signal of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

RELATIVE = 1e-7
"""Of the larger number. A float32 has 24 bits: 6e-8."""
ABSOLUTE = 1e-12
"""What a sum to 0 of numbers up to about 1,000 leaves over, in float64."""


def all_equal(values: Iterable[float]) -> bool:
    """Whether all `values`, at least one, are the same number but for rounding."""
    values = list(values)
    return math.isclose(min(values), max(values), rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def reaches(value: float, least: float) -> bool:
    """Whether `value` is at least `least`, but for rounding: 0.7 + 0.2 + 0.1 reaches 1."""
    return value >= least or math.isclose(value, least, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
