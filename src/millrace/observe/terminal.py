"""All output to a terminal: text of a reward, a model or a row is shown, and never acts as a command.

Without this, an escape sequence in an error or a completion could move the cursor, rename the window or hide
earlier output. A direction mark could show text in another order. Pages use the same function.
"""

from __future__ import annotations

import errno
import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_KEPT = "\n\t"
_DIRECTION_MARKS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_INVISIBLE = (0x200B, *range(0x2060, 0x2065), 0xFEFF, *range(0xE0000, 0xE0080))
"""A model would read text in these characters, and no person could. The joiners of scripts and emoji stay."""
_HARMLESS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT},  # Unicode's control pictures
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), 0x2028, 0x2029, *range(0xD800, 0xE000)), 0xFFFD),
    **dict.fromkeys((*_DIRECTION_MARKS, *_INVISIBLE), 0xFFFD),
}


def harmless(text: str) -> str:
    """`text` with a visible character for each character that a terminal or a page would hide or obey. Lines,
    tabs and the number of characters stay."""
    return text.translate(_HARMLESS)


def drop_output(stream: IO[str]) -> None:
    """Nobody reads `stream` any more: drop all later output."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def reader_has_gone(error: OSError) -> bool:
    """Whether a write failed because nobody reads any more: `| head` has ended, or a terminal was closed."""
    return error.errno in (errno.EPIPE, errno.EIO)


class Terminal(Console):
    """A rich console that renders text harmless, and without markup in brackets.

    When its reader has gone (`| head`, a closed terminal), the console ends the command. A `lasting` console
    drops its output instead, and sets `reader_gone`.
    """

    def __init__(self, *, lasting: bool = False, **how: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **how})
        self._lasting = lasting
        self.reader_gone = False

    def on_broken_pipe(self) -> None:
        if not self._lasting:
            super().on_broken_pipe()
        self.reader_gone = self.quiet = True
        drop_output(self.file)

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            if reader_has_gone(error):
                raise BrokenPipeError from error
            raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own
                yield segment
            else:
                yield Segment(self._writable(harmless(segment.text)), segment.style)

    def _writable(self, text: str) -> str:
        """`text` with a question mark for each character that the terminal's encoding lacks."""
        if self.encoding.startswith("utf"):
            return text
        return text.encode(self.encoding, "replace").decode(self.encoding)


def can_redraw(console: Console) -> bool:
    """Whether a live view can be drawn there, again and again in its place."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")


def as_text(shown: RenderableType, width: int, *, soft_wrap: bool = False) -> str:
    """What a terminal of that width would show, without colours. `soft_wrap`: long lines stay whole."""
    stream = io.StringIO()
    Terminal(file=stream, width=width).print(shown, soft_wrap=soft_wrap)
    return stream.getvalue().rstrip("\n")


@dataclass(frozen=True)
class Check:
    """One claim: whether the claim holds, and its numbers."""

    claim: str
    holds: bool
    detail: str


def print_checks(console: Console, checks: Sequence[Check]) -> bool:
    """One line each. Returns whether all hold."""
    for check in checks:
        word = ("PASS", "green") if check.holds else ("FAIL", "red")
        console.print(Text.assemble(word, f"  {check.claim}: {check.detail}"))
    return all(check.holds for check in checks)


def typed() -> str:
    """The command that started this process, for hints that a user can paste.

    `millrace` if the shell finds this program under that name, else its path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join([sys.executable, "-m", "millrace"])
    path = shutil.which("millrace")
    if program.name != "millrace" or (path is not None and Path(path).resolve() == program.resolve()):
        return "millrace"
    return shlex.quote(sys.argv[0])


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """One bar for each value, between `low` and `high`; None: the smallest and the largest value."""
    low = min(values, default=0.0) if low is None else low
    high = max(values, default=0.0) if high is None else high
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
