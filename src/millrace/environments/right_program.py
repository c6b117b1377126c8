"""The right program of a row, where public data sets have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from millrace.environments.rows import Row, find_column

PROGRAMS = ("canonical_solution", "reference_solution", "solution", "solutions", "code")
"""Columns in which public data sets have a right program, where `task.answer` names none."""
PYTHON_3 = 3
"""The language in the solutions of CodeContests."""


def reference_program(answer: Any, columns: Row) -> str | None:
    """A completion that should pass all tests of a row: the right program of the row; None: it has none.

    A program is a text, or the first of a list of programs, as data or as JSON; or the first in Python 3 of a
    table of CodeContests. A body that goes on where the prompt ends is a program too, as in HumanEval.
    """
    named = (find_column(columns, name) for name in PROGRAMS)
    return next(filter(None, map(_program, (answer, *named))), None)


def _program(column: Any) -> str | None:
    if isinstance(column, str) and column.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            column = json.loads(column)
    if isinstance(column, Mapping) and {"language", "solution"} <= set(column):
        pairs = zip(column["language"], column["solution"], strict=False)
        column = [program for language, program in pairs if language in (PYTHON_3, "PYTHON3")]
    if isinstance(column, list | tuple):
        column = next((one for one in column if isinstance(one, str) and one.strip()), None)
    return column if isinstance(column, str) and column.strip() else None
