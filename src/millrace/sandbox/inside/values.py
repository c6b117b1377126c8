"""Plain values as JSON, between a program and the tests that call its functions.

None, True, False, numbers, texts and lists are themselves. Others have a tag: `{"tuple": [...]}`. What is
decoded consists of Python's own types alone, whoever encoded it: so no value can lie about what it equals.
"""

from __future__ import annotations

import math
from typing import Any


def encode(value: Any) -> Any:
    """The value for JSON. A subclass becomes its plain base.

    Raises:
        TypeError: the value is of another type.
        RecursionError: it is too deep, or contains itself.
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
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(each) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, complex):
        return {"complex": repr(complex(value.real, value.imag))}
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def decode(data: Any) -> Any:
    """The value. Raises ValueError or TypeError: `encode` did not make that."""
    if isinstance(data, list):
        return [decode(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    match tag:
        case "dict":
            return {decode(key): decode(each) for key, each in inner}
        case "tuple":
            return tuple(map(decode, inner))
        case "set":
            return set(map(decode, inner))
        case "frozenset":
            return frozenset(map(decode, inner))
        case "bytes":
            return bytes.fromhex(inner)
        case "float":
            return float(inner)
        case "complex":
            return complex(inner)
    raise ValueError(f"no value has the tag {tag!r}")
