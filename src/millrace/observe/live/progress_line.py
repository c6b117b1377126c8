"""The progress of one long command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

from millrace.observe.live.live_view import LINE_EVERY_S


@contextmanager
def progress_line(console: Console, first: str) -> Iterator[Callable[[str, bool], None]]:
    """Yields a function that shows a line, and is told whether the work of the line has ended.

    On a terminal one line is updated, which disappears at the end; `first` is shown first. Elsewhere a line
    is printed when its work has ended, and every few seconds."""
    printed_s, in_lines = time.monotonic(), not console.is_terminal or console.is_dumb_terminal
    with nullcontext() if in_lines else console.status(first) as status:

        def show(line: str, ended: bool) -> None:
            nonlocal printed_s
            if status is not None:
                status.update(line)
            elif ended or time.monotonic() - printed_s >= LINE_EVERY_S:
                printed_s = time.monotonic()
                console.print(line)

        yield show
