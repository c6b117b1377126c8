"""A small curve of characters."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """One bar for each value, between `low` and `high`; None: the smallest and the largest value."""
    low = min(values, default=0.0) if low is None else low
    high = max(values, default=0.0) if high is None else high
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
