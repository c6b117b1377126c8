"""A row of a data set as the filters see it, why a row is dropped, and the columns of a row as JSON, in
which a curation writes them.
"""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from millrace.core.errors import DataError
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


# ---------------------------------------------------------------- columns as JSON


def check_writable(rows: Sequence[CandidateRow]) -> None:
    """Raises: DataError: JSON cannot represent a value of a row. The message names the row and the column."""
    for row in rows:
        kept_columns(row)


def kept_columns(row: CandidateRow) -> dict[str, Any]:
    """The columns of a row that is kept. Raises: DataError, as `check_writable`."""
    columns = {}
    for name, value in row.columns.items():
        try:
            columns[name] = as_json(value)
        except (TypeError, RecursionError) as error:
            raise DataError(
                f"{row.row_id}: column {name!r} cannot be kept as JSON: {error}.\n"
                "  Leave the column out, or make text of it"
            ) from None
    return columns


def shown_columns(row: CandidateRow) -> dict[str, Any]:
    """The columns of any row, for a person: a value that JSON cannot represent is described."""
    columns: dict[str, Any] = {}
    for name, value in row.columns.items():
        try:
            columns[str(name)] = as_json(value)
        except (TypeError, RecursionError) as error:
            columns[str(name)] = f"({error})"
    return columns


def as_json(value: Any) -> Any:
    """Dates, decimals and UUIDs of Parquet become text, durations seconds, arrays lists, and what is no
    number or no time null, as Parquet has missing ones.

    Raises: TypeError: JSON has no such value.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise TypeError("it has an infinite number")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"it has a key that is a {type(odd[0]).__name__}")
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    return _text_or_number(value)


def _text_or_number(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat() if value == value else None  # pandas has a time that is none
    if isinstance(value, datetime.timedelta):
        return value.total_seconds() if value == value else None
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if hasattr(value, "tolist") and not isinstance(plain := value.tolist(), type(value)):
        return as_json(plain)
    raise TypeError(f"it has a {type(value).__name__}")
