"""When an answer of a program equals what the tests expect: returned values, and printed text."""

from __future__ import annotations

import ast
import decimal
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from millrace_sandbox.inside.values import BYTES, NUMBER, SET, TEXT

TOLERANCE = 1e-6
"""Two numbers are equal if they differ by no more than this share, as for the judges of Codeforces and
AtCoder. An expected integer is exact: a number with a point may differ from it by this much, and not by a
share of it."""
NEAR_ZERO = 1e-9
"""So much may a returned number differ in any case: the rest of a sum that should be 0."""
EXACT = 2**53
"""Integers below are floats without a loss."""
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
"""As programs print numbers. 007, +5 and 1,000 are no numbers: there the text matters."""


def is_equal(value: Any, expected: Any) -> bool:
    """Whether two values of JSON are equal. True is not 1; a list is not a text; NaN equals nothing.

    What JSON has not is equal to each form that data sets give it: a set to its members in any order, a date
    to its text, bytes to their text or their numbers, all of them also to what Python shows.
    """
    try:
        return _is_equal(value, expected)
    except RecursionError:
        return False


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(value, dict) and len(value) == 1 and (tag := next(iter(value))) in _FOREIGN:
        return _FOREIGN[tag](value[tag], expected)
    if isinstance(expected, str) and isinstance(value, list) and expected.startswith("("):
        return _is_equal(value, _shown(expected, tuple))
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return value is expected
    if isinstance(expected, int | float):
        return isinstance(value, int | float) and _is_close(value, expected)
    if isinstance(expected, str):
        return isinstance(value, str) and value == expected
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list) and len(value) == len(expected) and all(map(_is_equal, value, expected))
        )
    if isinstance(expected, Mapping):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_is_equal(value[key], expected[key]) for key in expected)
        )
    return False


def _is_set(members: Any, expected: Any) -> bool:
    """The members may be in any order, and none is there twice."""
    others = _shown(expected, set) if isinstance(expected, str) else expected
    if not isinstance(members, list) or not isinstance(others, list | set) or len(members) != len(others):
        return False
    one, other = sorted(members, key=_rank), sorted(others, key=_rank)
    return all(map(_is_equal, one, other)) and not any(map(_is_equal, one, one[1:]))


def _rank(value: Any) -> tuple[float, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (value, "") if is_number else (math.inf, json.dumps(value, sort_keys=True, default=str))


def _is_bytes(digits: Any, expected: Any) -> bool:
    try:
        data = bytes.fromhex(digits)
    except (TypeError, ValueError):
        return False
    if isinstance(expected, str):
        return data == expected.encode(errors="replace") or repr(data) == expected
    return isinstance(expected, list) and list(data) == expected


def _is_text(text: Any, expected: Any) -> bool:
    """A moment has a T or a space between its day and its time."""
    forms = (expected, re.sub(r"(?<=^\d{4}-\d\d-\d\d)T", " ", expected)) if isinstance(expected, str) else ()
    return text in forms


def _is_number(pair: Any, expected: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return _is_equal(pair[isinstance(expected, str)], expected)


_FOREIGN = {SET: _is_set, BYTES: _is_bytes, TEXT: _is_text, NUMBER: _is_number}


def _shown(text: str, kind: type) -> Any:
    """The value that Python shows so, if it is of that kind; else None."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return set[Any]() if kind is set and text == "set()" else None
    return value if isinstance(value, kind) else None


def _is_close(value: float, expected: float) -> bool:
    if value == expected:
        return True
    if isinstance(expected, int):
        return isinstance(value, float) and abs(expected) < EXACT and abs(value - expected) <= TOLERANCE
    try:
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=NEAR_ZERO)
    except OverflowError:  # an integer that is no float
        return False


def prints_the_same(printed: str, expected: str) -> bool:
    """Whether two texts have the same words in the same lines; blank lines at the ends do not count.

    Two words that are numbers are equal as numbers: 0.50 is 0.5. They may differ by `TOLERANCE`, of the
    expected number or of 1. An expected integer is exact (see `TOLERANCE`), and two integers are the same
    text.
    """
    lines = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    return len(lines[0]) == len(lines[1]) and all(map(_same_words, *lines))


def _same_words(printed: list[str], expected: list[str]) -> bool:
    return len(printed) == len(expected) and all(map(_is_same_word, printed, expected))


def _is_same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(printed) and _INTEGER.fullmatch(expected):
        return False
    try:
        one, other = decimal.Decimal(printed), decimal.Decimal(expected)
        size = decimal.Decimal(1) if _INTEGER.fullmatch(expected) else max(decimal.Decimal(1), abs(other))
        return abs(one - other) <= decimal.Decimal(TOLERANCE) * size
    except decimal.DecimalException:  # beyond all exponents
        return False
