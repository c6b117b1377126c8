"""What `millrace eval` prints while it works."""

from __future__ import annotations

import io

import pytest

from millrace.cli import evaluate
from millrace.observe.live import live_view
from millrace.observe.terminal import Terminal


def test_in_a_pipe_progress_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(live_view.time, "monotonic", lambda: now_s)
    pipe = io.StringIO()
    with evaluate.progress(Terminal(file=pipe), "start") as tell:
        for ended in range(1, 21):
            now_s += 1.0
            tell(ended, 20)
    assert pipe.getvalue().splitlines() == [
        "Loading start",
        "5 of 20 completions",
        "10 of 20 completions",
        "15 of 20 completions",
        "20 of 20 completions, now their rewards",
    ]


def test_on_a_terminal_progress_is_one_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERM", raising=False)
    screen = io.StringIO()
    with evaluate.progress(Terminal(file=screen, force_terminal=True), "start") as tell:
        tell(20, 20)
    assert "\x1b" in screen.getvalue() and "Loading start\n" not in screen.getvalue()
