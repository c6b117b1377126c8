"""What may colour a token, and the shade that it gets: the same on a page and in a terminal."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite

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
