"""Rows of a task as lines of JSON. A run keeps a list or a data set in this form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from millrace.core.errors import DataError
from millrace.tasks.rows import find_column


def read_rows(rows: Any) -> list[dict[str, Any]]:
    """Plain dicts of a sequence of dicts, a `datasets.Dataset` or a pandas frame.

    Raises: DataError: `rows` is none of these, is empty, or a row is no dict.
    """
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a pandas frame iterates over its columns
        rows = rows.to_dict("records")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        hint = f"; choose a split: {', '.join(map(str, rows))}" if isinstance(rows, Mapping) else ""
        raise DataError(
            f"`rows` must be a sequence of dicts or a datasets.Dataset, not a {type(rows).__name__}{hint}"
        )
    plain = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} of `rows` is a {type(row).__name__}, not a dict of columns")
        plain.append(dict(row))
    if not plain:
        raise DataError("`rows` is empty: a task needs at least one row")
    return plain


def check_column(rows: list[dict[str, Any]], key: str, column: str) -> None:
    """Raises: DataError: no row has the column that `key` names."""
    if not any(find_column(row, column) is not None for row in rows):
        columns = sorted({str(name) for row in rows for name in row})
        raise DataError(
            f"no row has the column {column!r} (`{key}`); the rows have {columns}.\n"
            f"  Rename a column, or name the right one: {key} = ..."
        )


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    """One JSON object a line. Raises: DataError: JSON cannot represent a value; names row and column."""
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, default=_number, ensure_ascii=False))
        except (TypeError, ValueError):
            name, value = next((n, v) for n, v in row.items() if not _is_json(v))
            raise DataError(
                f"row {index}, column {name!r}: a {type(value).__name__} cannot be kept as JSON.\n"
                "  Use text, numbers, lists and dicts, or leave the column out"
            ) from None
    return ("\n".join(lines) + "\n").encode()


def _number(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, default=_number)
    except (TypeError, ValueError):
        return False
    return True
