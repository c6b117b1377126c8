"""A row of a data set as the filters see it, and why a row is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from millrace.tasks.rows import Row


class Reason(StrEnum):
    """Why a row is dropped, in the order of the filters."""

    BROKEN = "broken"
    EMPTY = "empty"
    TOO_LONG = "too long"
    TOO_SHORT = "too short"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near duplicate"
    CONTAMINATED = "contaminated"
    GOLD_REFUSED = "gold refused"
    WRONG_ACCEPTED = "wrong accepted"
    UNSCORED = "unscored"
    TOO_HARD = "too hard"
    TOO_EASY = "too easy"


@dataclass(frozen=True, slots=True)
class Dropped:
    """`detail` is for a person: a number, a name of another row, or an error."""

    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One row of a task. `index` is its number there. `prompt` is the text that the model gets, with
    `tokens`. `text` is what filters compare: without template and chat markup where these add no column.
    `fault` says why the row makes no prompt, and then the other fields are empty."""

    index: int
    row_id: str
    columns: Row = field(default_factory=dict)
    text: str = ""
    prompt: str = ""
    tokens: Sequence[int] = ()
    answer: str | None = None
    fault: str = ""
