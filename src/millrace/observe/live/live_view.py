"""A run while it goes on: a panel that refreshes itself, plain lines, or lines of JSON for a collector."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from millrace.core import clock
from millrace.core.events import Event, Events
from millrace.observe.live import phrases
from millrace.observe.live.panel import render
from millrace.observe.live.status import Status
from millrace.observe.sinks.jsonl import encoded
from millrace.observe.terminal import Terminal, can_redraw, drop_output, reader_has_gone

_REFRESHES_PER_S = 4
LINE_EVERY_S = 5.0
_SAMPLE_EVERY_S = 60.0
_SAMPLE_CHARACTERS = 80
_TROUBLE = {
    *("run_ended", "worker_died", "worker_recovered", "starting", "stalled", "warned"),
    *("finding", "withdrawn"),
}


class LiveView:
    """A sink and a context manager. On a terminal that can move its cursor and show bars, a thread of rich
    redraws the newest status. Elsewhere a line is printed every few seconds at most, at trouble, and at the
    end."""

    def __init__(self, console: Console | None = None) -> None:
        self.status = Status()
        self._console = console or Terminal()
        self._live: Live | None = None
        self._printed_wall_s = self._sampled_wall_s = float("-inf")

    def __enter__(self) -> LiveView:
        console = self._console
        if can_redraw(console):
            self._live = Live(
                console=console,
                get_renderable=self._panel,
                refresh_per_second=_REFRESHES_PER_S,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        self.status(event)
        if self._live is not None:
            return
        if event.kind == "sample":
            if event.wall_s - self._sampled_wall_s >= _SAMPLE_EVERY_S:
                self._sampled_wall_s = event.wall_s
                self._console.print(Text(sample_line(self.status)), soft_wrap=True)
        elif self._line_is_due(event):
            self._printed_wall_s = event.wall_s
            self._console.print(Text(plain_line(self.status)), soft_wrap=True)

    def _panel(self) -> RenderableType:
        if self.status.started_wall_s and self.status.ended is None:
            self.status.wall_s = clock.wall()  # time passes between events too
        return render(self.status, self._console.width)

    def _line_is_due(self, event: Event) -> bool:
        if event.kind in _TROUBLE:
            return True
        return event.kind != "run_started" and event.wall_s - self._printed_wall_s >= LINE_EVERY_S


def plain_line(status: Status) -> str:
    """The run in one line of text."""
    parts = [f"step {status.version}/{status.steps_total}", *(_progress(status) if status.stepped else [])]
    if not status.stepped and status.ended is None:
        parts.append(phrases.starting(status))
    if status.restarts:
        parts.append(f"restarts {status.restarts} ({status.last_trouble})")
    elif status.last_trouble:
        parts.append(status.last_trouble)
    parts += status.findings.values()
    if status.ended is not None:
        parts.append(f"ended: {status.ended}")
    return " | ".join(parts)


def _progress(status: Status) -> list[str]:
    failed = [phrases.failed_rewards(status)] if status.num_failed else []
    return [
        f"reward {phrases.number(phrases.last(status.rewards), '.3f')}",
        phrases.learning(status),
        f"staleness {phrases.number(status.staleness_mean, '.2f')} (max {status.staleness_max})",
        *phrases.fairness(status),
        phrases.speeds(status),
        f"trainer idle {phrases.percent(status.trainer_idle_fraction)}",
        f"in flight {status.in_flight}",
        *failed,
        *phrases.environment(status),
        *phrases.memory(status),
        *([f"left {phrases.duration(status.remaining_s)}"] if status.ended is None else []),
    ]


def sample_line(status: Status) -> str:
    """The newest sample in one line; empty while there is none."""
    sample = phrases.sample(status)
    if sample is None:
        return ""
    head, *texts = sample
    return f"{head} {' => '.join(phrases.ends(text, _SAMPLE_CHARACTERS) for text in texts)}"


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


LEFT_OUT = frozenset({"admitted", "beginning", "leased", "report", "finished", "observed", "scored", "ended"})
"""Kinds that come for every trajectory, or many times a second: `events.jsonl` has them."""

_LEVELS = {
    **dict.fromkeys(("worker_died", "step_rejected", "replay_differs", "stage_missed"), "warning"),
    **dict.fromkeys(("stalled", "quarantined", "warned", "finding"), "warning"),
}


class StructuredLog:
    """A sink. Each line has `level` (info, warning, error), `wall_s` (since the epoch), `kind`, `text` (the
    run in one line, for people) and `fields` (of the event). When nobody reads the stream any more, later
    lines are dropped, and `reader_gone` is true."""

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # JSON is UTF-8 in every locale
        self._stream, self._status = stream, Status()
        self.reader_gone = False

    def __call__(self, event: Event) -> None:
        self._status(event)
        if event.kind in LEFT_OUT:
            return
        line = {
            "level": _level(event),
            "wall_s": event.wall_s,
            "kind": event.kind,
            "text": plain_line(self._status),
            "fields": event.fields,
        }
        try:
            self._stream.write(encoded(line).decode() + "\n")
            self._stream.flush()
        except OSError as error:
            if not reader_has_gone(error):
                raise
            self.reader_gone = True
            drop_output(self._stream)


def _level(event: Event) -> str:
    if event.kind == "run_ended" and not event.fields["ok"]:
        return "error"
    return _LEVELS.get(event.kind, "info")


class LostReaders:
    """A sink. Reports once, as a `warned` event, that one of `outlets` has lost its reader. `Terminal` and
    `StructuredLog` then drop their output."""

    def __init__(self, events: Events, outlets: list[Any]) -> None:
        self._events, self._outlets, self._warned = events, outlets, False

    def __call__(self, _: Event) -> None:
        if self._warned or not any(getattr(outlet, "reader_gone", False) for outlet in self._outlets):
            return
        self._warned = True
        self._events.emit(
            "warned",
            source="output",
            reason="nobody reads it any more: what would be printed is dropped, and the run goes on",
        )
