"""What may colour a token, and the shade that it gets: the same on a page and in a terminal; and the colours
of lines and the scale of an axis, for curves and for bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor, isfinite, log10

import numpy as np
import numpy.typing as npt

from millrace_ui.record.steps import Array

LEVELS, NATS_PER_LEVEL = 8, 0.5
"""Shades of a token by its log-prob. The last shade is for all smaller log-probs."""
VERSION_COLORS = 6
TONES = 4
"""Shades of an advantage above 0, and as many below. The last is for the largest of the group."""


class TokenColor(StrEnum):
    """A value is the name in an address and of an option."""

    LOGPROB = "logprob"
    ADVANTAGE = "advantage"
    VERSION = "version"
    NONE = "none"

    @property
    def words(self) -> str:
        return {TokenColor.LOGPROB: "log-prob", TokenColor.NONE: "nothing"}.get(self, self.value)


def level(logprob: float) -> int:
    """From 0 (likely) to `LEVELS`. NaN gets the last."""
    return int(max(0, min(LEVELS, -logprob / NATS_PER_LEVEL)))


def tone(advantage: float, largest: float) -> int:
    """From 0 (the lowest) to 2 * `TONES`; the middle is for 0."""
    share = advantage / largest if largest and isfinite(advantage / largest) else 0.0
    return TONES + round(share * TONES)


# ---------------------------------------------------------------- lines and axes


COLORS = ("#3a86d1", "#e08a00", "#8a6fd1", "#2fa5b5", "#a5714a", "#9a9a1e")
"""Of lines. A line is a quantity, a run or a schedule."""
LEAST_RANGE, ROUNDING = 1e-290, 1e-9
"""Values that differ by less are drawn as equal: absolute, and as a share of the largest."""


@dataclass(frozen=True, slots=True)
class ChartScale:
    """From `low` (place 0) to `high` (place 1). Of a logarithmic scale both are above 0."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, low: float, high: float, *, log: bool = False, room: float = 0.0) -> ChartScale:
        """`room`: the share of the range that is added at both ends."""
        if log:
            times = max((high / low) ** room, 1.05) if room or high == low else 1.0
            return cls(low / times, high * times, log)
        if high - low <= max(LEAST_RANGE, ROUNDING * max(abs(low), abs(high))):
            around = abs(low) / 10 or 1.0
            return cls(low - around, high + around)
        return cls(low - room * (high - low), high + room * (high - low))

    def places(self, values: npt.ArrayLike) -> Array:
        """Values beyond the ends stand at the ends."""
        inside = np.clip(values, self.low, self.high)
        if self.log:
            return np.asarray(np.log10(inside / self.low) / log10(self.high / self.low))
        return np.asarray((inside - self.low) / (self.high - self.low))

    def marks(self, num: int = 5) -> list[float]:
        """Round values, about `num` of them."""
        if self.log:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            for factors in ((1,), (1, 2, 5)):
                every = self._inside([float(f"{f}e{power}") for power in powers for f in factors])
                if len(every) >= 3:
                    return every[:: ceil(len(every) / (num + 2))]
        wide = (self.high - self.low) / num
        power = 10.0 ** floor(log10(wide))
        step = next((f * power for f in (1, 2, 5) if f * power >= wide), 10 * power)
        first = ceil(self.low / step)
        return self._inside([i * step for i in range(first, first + 2 * num + 2)])

    def _inside(self, values: list[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]


def apart(values: Sequence[float]) -> list[str]:
    """Numbers of an axis in few characters, with so many digits that they differ."""
    texts = [written(value) for value in values]
    for digits in range(5, 10):
        if len(set(texts)) == len(values):
            break
        texts = [f"{value:.{digits}g}" for value in values]
    return texts


def written(value: float) -> str:
    """A number in few characters."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"
