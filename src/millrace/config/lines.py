"""Text of TOML: the line that sets a key, which neither `tomllib` nor `tomlkit` says, and values as text.

A statement is a table header or an assignment; it may span lines (multi-line strings, arrays). The
scan grows each statement line by line until `tomllib` accepts it, so quoting, comments and dotted
keys follow the real grammar. The text must be valid TOML.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> 1-based line, for every table and every assigned key (the last one wins)."""
    lines: dict[str, int] = {}
    prefix = ""
    for number, tree, is_header in _statements(text):
        for key in _keys(tree):
            lines[prefix + key if not is_header else key] = number
        if is_header:
            prefix = max(_keys(tree), key=len) + "."
    return lines


def _statements(text: str) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """A line ends with a line feed alone: strings of TOML may have other separators, such as U+2028."""
    start, pending = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        start = start if pending else number
        pending += line + "\n"
        try:
            tree = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        if tree:
            yield start, tree, pending.lstrip().startswith("[")
        pending = ""


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield prefix + name
        inner = value[-1] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            yield from _keys(inner, prefix + name + ".")


def as_toml(value: Any) -> str:
    """A JSON value as TOML reads it back. None is `"none"`; a table is an inline one.

    `tomli-w` writes whole documents and no single values; `tomlkit` needs this loop for inline tables.
    """
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            return _string(value)
        case dict():
            inner = ", ".join(f"{_string(key)} = {as_toml(item)}" for key, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return "[" + ", ".join(map(as_toml, value)) + "]"
    return repr(value)


def _string(text: str) -> str:
    """JSON's escapes are TOML's, except that TOML also escapes DEL and takes no surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
