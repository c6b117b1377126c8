"""Plain values as JSON, between a program and the tests that call its functions.

None, True, False, numbers, texts and lists are themselves. Others have a tag: `{"tuple": [...]}`. What is
decoded consists of Python's own types alone, whoever encoded it: so no value can lie about what it equals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

_Made = Callable[[Any], Any]
_LISTS: dict[str, tuple[type[Any], _Made]] = {
    **{kind.__name__: (kind, kind) for kind in (tuple, set, frozenset, deque)},
    "iterator": (Iterator, iter),
}
"""By tag: the type of what consists of values, and what makes one of a list of them."""
_OTHERS: dict[str, tuple[type[Any], _Made, _Made]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda value: repr(complex(value.real, value.imag)), complex),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda data: range(*data)),
    "fraction": (Fraction, lambda value: [value.numerator, value.denominator], lambda data: Fraction(*data)),
    "decimal": (Decimal, str, Decimal),
}
"""By tag: a type, what JSON has for a value, and what makes the value of that."""


def encode(value: Any) -> Any:
    """The value for JSON. A subclass becomes its plain base.

    Raises:
        TypeError: the value is of another type.
        RecursionError: it is too deep, or contains itself.
    Degenerate:
        An iterator or a generator -> all that it still gives, as an iterator.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        plain = float.__float__(value)
        return plain if math.isfinite(plain) else {"float": repr(plain)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in dict.items(value)]}
    for tag, (kind, _) in _LISTS.items():
        if isinstance(value, kind):
            return {tag: [encode(each) for each in value]}
    for tag, (kind, written, _) in _OTHERS.items():
        if isinstance(value, kind):
            return {tag: written(value)}
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def decode(data: Any) -> Any:
    """The value. Raises: ValueError, TypeError, ArithmeticError: `encode` did not make that."""
    if isinstance(data, list):
        return [decode(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    if tag == "dict":
        return {decode(key): decode(each) for key, each in inner}
    if tag == "float":
        return float(inner)
    if tag in _LISTS:
        return _LISTS[tag][1]([decode(each) for each in inner])
    if tag in _OTHERS:
        return _OTHERS[tag][2](inner)
    raise ValueError(f"no value has the tag {tag!r}")
