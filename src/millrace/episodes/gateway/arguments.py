"""Arguments of a tool's call as one text, however an agent writes them again."""

from __future__ import annotations

import json
from typing import Any

WHOLE_BELOW = 1e21
"""JavaScript writes a smaller number without a fraction as an integer."""


def canonical(arguments: str) -> str:
    """The same JSON value in one spelling: of spaces, escapes and whole numbers. The order of keys is kept.

    A program parses the arguments and writes them again in the spelling of its language. Half of a pair of
    surrogates has no UTF-8, and becomes U+FFFD. A text that is no JSON, or has no end of nesting, is itself.
    """
    try:
        return from_value(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def from_value(value: Any) -> str:
    """Raises: ValueError: a number is infinite or none. RecursionError: the value is nested too deep."""
    text = json.dumps(_with_whole_numbers(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_object(arguments: str) -> dict[str, Any]:
    """The table of arguments. A text that is no JSON object is the one argument `arguments`."""
    try:
        value = json.loads(canonical(arguments))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < WHOLE_BELOW:
        return int(value)
    return value
