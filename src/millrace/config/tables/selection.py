"""`[selection]`: which rows rest, because the model always or never solves them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.config.tables.section import Count, Section


class SelectionSection(Section):
    retry: float = Field(default=0.1, ge=0.01, le=1)
    """Least probability with which a prompt of the stream is taken. So a row that rests is tried again."""
    correct_at: float = Field(default=1.0, ge=-1e6, le=1e6)
    """A reward of at least this is correct."""


class RestSelection(SelectionSection):
    kind: Literal["rest"] = "rest"
    """A row rests while its last `groups` groups were all solved, or all hopeless: the rewards within a group
    are equal, and at least `correct_at` (solved) or less (hopeless)."""
    groups: Count = 2
    """Groups in a row that must be solved before the row rests, or hopeless."""


class SignalSelection(SelectionSection):
    kind: Literal["signal"] = "signal"
    """A row is taken with the probability 4 p (1 - p), where p is its pass rate: most often at p = 0.5."""
    discount: float = Field(default=0.5, ge=0, le=1)
    """Weight of a group of the row in p, relative to its next group. 0: only the last one counts."""


Selection = RestSelection | SignalSelection
