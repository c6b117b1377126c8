"""The name of a trial, which is its directory: its keys and values, as `lr=0.001,seed=1`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from millrace_sweeps.decisions.space import DIGITS, identity

NAME_MAX = 100
DIGEST_BYTES = 4


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or all of it if two keys end alike."""
    keys = list(keys)
    last = [key.rpartition(".")[2] for key in keys]
    return {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}


def trial_name(overrides: Mapping[str, Any]) -> str:
    """What a name cannot show, such as a path or a table, is in a digest at its end."""
    short = short_keys(overrides)
    exact = ",".join(f"{short[key]}={_text(value)}" for key, value in overrides.items())
    name = re.sub(r"[^\w.,=+-]+", "_", exact, flags=re.ASCII)[:NAME_MAX]
    if name == exact and all(map(_is_exact, overrides.values())):
        return name
    digest = blake2b(identity(overrides).encode(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{name}-{digest}"


def shown(value: Any) -> str:
    """A value in a table."""
    return _text(value)


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.{DIGITS}g}"
        case {"kind": str(kind)}:
            return kind
    return str(value)


def _is_exact(value: Any) -> bool:
    """Whether the text of a value tells it from every other value."""
    if isinstance(value, float):
        return float(_text(value)) == value
    return isinstance(value, bool | int | str)
