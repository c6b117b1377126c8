"""When an answer of a program equals what the tests expect: returned values, and printed text."""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Mapping
from typing import Any

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
    """Whether two values of JSON are equal. True is not 1; a list is not a text; NaN equals nothing."""
    try:
        return _is_equal(value, expected)
    except RecursionError:
        return False


def _is_equal(value: Any, expected: Any) -> bool:
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
