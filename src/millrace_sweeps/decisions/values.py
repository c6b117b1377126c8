"""The value of a trial: the mean of its metric over the last steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

Series = Sequence[tuple[int, float]]
"""(version, value) of one trial, in the order of the versions."""


def value_at(series: Series, version: int, last: float) -> float | None:
    """The mean of the values after version * (1 - last), up to `version`.

    Degenerate:
        No value there, as with rare evaluations -> the last value before. None before -> None.
    """
    known = [(at, value) for at, value in series if at <= version and math.isfinite(value)]
    latest = [value for at, value in known if at > version * (1 - last)] or [v for _, v in known[-1:]]
    return math.fsum(latest) / len(latest) if latest else None


def value_of(series: Series, last: float) -> float | None:
    """The value at the last version so far."""
    return value_at(series, series[-1][0], last) if series else None
