"""What the API tells a person: on stderr, so that a script's own output stays its own."""

from __future__ import annotations

from millrace.observe.terminal import Terminal

_console = Terminal(stderr=True, soft_wrap=True)


def say(text: str) -> None:
    _console.print(text)


def warn(text: str) -> None:
    _console.print(f"Warning: {text}.", style="yellow")
