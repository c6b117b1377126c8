"""Values in TOML's notation; `tomllib` only reads.

`tomli-w` writes whole documents and no single values; `tomlkit` needs the same loop to make inline tables.
"""

from __future__ import annotations

import json
from typing import Any


def as_toml(value: Any) -> str:
    """A JSON value as TOML reads it back. None is `"none"`; a table is an inline one."""
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
