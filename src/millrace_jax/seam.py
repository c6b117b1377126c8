"""Names of values inside the forward pass. Outside of a `watching` block they trace to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_VALUES: ContextVar[dict[str, Any] | None] = ContextVar("values", default=None)


def watched(name: str, x: Any) -> Any:
    """`x`, which a `watching` block gets under its name."""
    values = _VALUES.get()
    if values is not None:
        values[name] = x
    return x


@contextmanager
def watching() -> Iterator[dict[str, Any]]:
    """What is traced in the block, by name. A program must return these arrays."""
    values: dict[str, Any] = {}
    token = _VALUES.set(values)
    try:
        yield values
    finally:
        _VALUES.reset(token)


@contextmanager
def watching_turn() -> Iterator[dict[str, Any]]:
    """In a turn of a loop: what the turn must return, because its arrays end with it. Nothing where nobody
    watches."""
    if _VALUES.get() is None:
        yield {}
        return
    with watching() as values:
        yield values
