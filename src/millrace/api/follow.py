"""Reads the lines of a run's files while the run writes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import DataError, boundary
from millrace.observe.sinks.log_files import Tail

POLL_S = 0.1


def lines(
    path: Path, has_ended: Callable[[], bool], position: int = 0, *, pause_s: float = POLL_S
) -> Iterator[dict[str, Any] | None]:
    """Every line of a JSONL file until the run has ended, and None whenever no further line is there yet.

    `position` is the first byte to read. After a None there is a pause of `pause_s`. Raises DataError: a line
    is damaged.
    """
    tail = Tail(path, position)
    while True:
        last = has_ended()  # before reading, so that the last lines are read
        yield from new_lines(path, tail)
        if last:
            return
        yield None
        time.sleep(pause_s)


def new_lines(path: Path, tail: Tail) -> Iterator[dict[str, Any]]:
    """The lines of the file at `path` that `tail` has not taken yet. Raises DataError: a line is damaged."""
    for taken in iter(tail.take, []):
        for line in taken:
            with boundary(str(path), f"not a whole line: {line[:80]!r}", DataError):
                fields = msgspec.json.decode(line, type=dict[str, Any])
            yield fields
