"""Text of TOML: the line that sets a key, which neither `tomllib` nor `tomlkit` says, values as text, and
what is wrong with a text that is no TOML, with what to write instead.

A statement is a table header or an assignment; it may span lines (multi-line strings, arrays). The
scan grows each statement line by line until `tomllib` accepts it, so quoting, comments and dotted
keys follow the real grammar. The text must be valid TOML.

`tomllib` and `tomlkit` name the place, and the character that they did not expect there.
"""

from __future__ import annotations

import json
import re
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


# ---------------------------------------------------------------- a text that is no TOML


PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
SETS = re.compile(r"\s*([\w.-]+)\s*=\s*(.*?)\s*(?:#.*)?")
HEADER = re.compile(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?")
YAML = re.compile(r"\s*([\w.-]+)\s*:(?:\s+(.*))?")


def mistake(text: str, error: tomllib.TOMLDecodeError) -> tuple[str, int]:
    """The mistake with its remedy, and the 1-based line."""
    lines = text.removesuffix("\n").split("\n")
    place = PLACE.search(str(error))
    reason = PLACE.sub("", str(error))
    if place is None or place[1] is None:
        return f"the file ends in the middle of a value ({reason}).\n  Close its quotes or brackets", len(
            lines
        )
    number = int(place[1])
    line, before = lines[number - 1], lines[: number - 1]
    problem = _twice(line, before) or _foreign(line) or _value(line, before)
    return (
        problem or f"this line is no TOML ({reason}): `{line.strip()}`.\n  Write `key = value`, or `[table]`",
        number,
    )


def _twice(line: str, before: list[str]) -> str:
    earlier, number = key_lines("\n".join(before)), len(before) + 1
    if (header := HEADER.fullmatch(line)) and header[1] in earlier:
        return (
            f"`[{header[1]}]` stands twice, in lines {earlier[header[1]]} and {number}.\n"
            "  Put all its keys under one of them"
        )
    if (sets := SETS.fullmatch(line)) and (key := _table(before) + sets[1]) in earlier:
        return f"`{key}` is set twice, in lines {earlier[key]} and {number}.\n  Leave one of them out"
    return ""


def _foreign(line: str) -> str:
    if line.lstrip().startswith("{"):
        return "this is JSON, and a configuration is TOML.\n  Write `key = value` under `[table]`"
    if (yaml := YAML.fullmatch(line)) is None:
        return ""
    write = f"{yaml[1]} = {_as_toml(yaml[2])}" if yaml[2] else f"[{yaml[1]}]"
    return f"this is YAML, and a configuration is TOML.\n  Write `{write}`: `millrace keys` has all keys"


def _value(line: str, before: list[str]) -> str:
    sets = SETS.fullmatch(line)
    if sets is None or sets[2].startswith("="):
        return ""
    name, value = sets.groups()
    key = f"`{_table(before)}{name}`"
    if value and value[0] in "'\"" and value.count(value[0]) == 1:
        return f"{key} ({value}) has no closing quote.\n  Write {name} = {value}{value[0]}"
    if value.startswith('"'):
        problem = f"{key} has a backslash in double quotes.\n  Write {name} = '{value[1:-1]}'"
        return problem if "\\" in value and value.endswith('"') else ""
    if not value:
        return f"{key} has no value.\n  Write one behind `=`, or leave the line out"
    if value.startswith(("[", "{", "'")):
        return f"{key} ({value}) is no value of TOML.\n  Text stands in quotes"
    what = "text without quotes" if (better := _as_toml(value)).startswith('"') else "no value of TOML"
    return f"{key} ({value}) is {what}.\n  Write {name} = {better}"


def _table(before: list[str]) -> str:
    """The table to which a line after the lines `before` belongs, with a dot."""
    headers = [header[1] for line in before if (header := HEADER.fullmatch(line))]
    return f"{headers[-1]}." if headers else ""


def _as_toml(value: str) -> str:
    """`value` in TOML."""
    if value.lower() in ("true", "false"):
        return value.lower()
    if value.lower() in ("none", "null", "~"):
        return '"none"'
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        pass
    else:
        return value
    try:
        return repr(float(value))
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
