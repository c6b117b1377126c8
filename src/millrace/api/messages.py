"""Messages of the API. They go to stderr, because stdout is the script's."""

from __future__ import annotations

from millrace.observe.terminal import Terminal

_console = Terminal(stderr=True, soft_wrap=True)


def info(text: str) -> None:
    _console.print(text)


def warn(text: str) -> None:
    _console.print(f"Warning: {text}.", style="yellow")
