"""A run while it goes on: a panel that refreshes itself, for a terminal of a given width, plain lines, or
lines of JSON for a collector.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.core import clock
from millrace.core.events import Event, Events
from millrace.observe.live import phrases
from millrace.observe.live.status import Status
from millrace.observe.replica_times import ReplicaHistory
from millrace.observe.sinks.jsonl import encoded
from millrace.observe.terminal import Terminal, can_redraw, drop_output, reader_has_gone, sparkline

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


# ---------------------------------------------------------------- the panel


_SPARK_WIDTH = 48
_REWARD_WIDTH = 42  # of the reward's line without its bars, borders included
_NARROW = 74  # columns, below which facts stand under each other
_ECHO_WIDTH = 2  # room for the ^C that a terminal echoes: on a line of its own it would break the panel
_BORDERS_WIDTH = 4 + _ECHO_WIDTH
_HEADING_WIDTH = 62  # of the first line without its bar


def render(status: Status, width: int = 120) -> RenderableType:
    """The run as a panel for a terminal of `width` columns."""
    parts = [
        _heading(status, width),
        _reward(status, width),
        _numbers(status, width),
        *_sample(status, width),
        _replicas(status, width),
        *(Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in _computes(status)),
    ]
    troubles = filter(None, (*status.findings.values(), status.last_trouble))
    parts += (Text(trouble, style="yellow", overflow="ellipsis", no_wrap=True) for trouble in troubles)
    title = f"millrace · {status.schedule or 'starting'}"
    return Panel(Group(*parts), title=title, title_align="left", width=max(width - _ECHO_WIDTH, 20))


def _computes(status: Status) -> list[str]:
    """One line for all workers that compute alike."""
    alike: dict[str, list[str]] = {}
    for name, description in sorted(status.computes.items()):
        alike.setdefault(description, []).append(name)
    return [f"{', '.join(names)}: {description}" for description, names in alike.items()]


def _heading(status: Status, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    elapsed = status.wall_s - status.started_wall_s
    bar_width = min(32, max(4, width - _HEADING_WIDTH))
    grid.add_row(
        Text(f"step {status.version}/{status.steps_total}", style="bold"),
        ProgressBar(total=max(status.steps_total, 1), completed=status.version, width=bar_width),
        f"{phrases.duration(elapsed)} elapsed",
        f"{phrases.duration(status.remaining_s)} left" if status.ended is None else f"ended: {status.ended}",
    )
    return grid


def _reward(status: Status, width: int) -> RenderableType:
    rewards = list(status.rewards)
    if not rewards:
        ended = status.ended is not None
        return Text(
            "no step" if ended else phrases.starting(status), style="dim", overflow="ellipsis", no_wrap=True
        )
    shown = rewards[-min(_SPARK_WIDTH, max(4, width - _REWARD_WIDTH)) :]
    last = f"{rewards[-1]:.3f}  ({min(shown):.3f} to {max(shown):.3f})"
    return Text.assemble(("reward  ", "bold"), (sparkline(shown), "green"), "  ", last)


def _numbers(status: Status, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    worst = "-" if status.staleness_mean is None else status.staleness_max
    staleness = f"staleness {phrases.number(status.staleness_mean, '.2f')} mean, {worst} max"
    idle = [f"trainer idle {phrases.percent(status.trainer_idle_fraction)}", *phrases.fairness(status)]
    counts = f"in flight {status.in_flight}, being scored {status.scoring}, restarts {status.restarts}"
    pairs = (staleness, phrases.speeds(status)), (", ".join(idle), counts)
    for row in pairs if width >= _NARROW else ((text,) for pair in pairs for text in pair):
        grid.add_row(*row)
    rest = [
        phrases.learning(status),
        phrases.failed_rewards(status),
        *phrases.environment(status),
        *phrases.memory(status),
    ]
    return Group(grid, *map(Text, packed(rest, width - _BORDERS_WIDTH)))


def packed(facts: Sequence[str], room: int) -> list[str]:
    """The facts in order, in lines of at most `room` characters."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 2 <= room:
            lines[-1] += f", {fact}"
        else:
            lines.append(fact)
    return lines


def _sample(status: Status, width: int) -> list[Text]:
    """Two lines, at most as wide as the panel; none while there is no sample."""
    sample = phrases.sample(status)
    if sample is None:
        return []
    head, prompt, completion = sample
    room = width - _BORDERS_WIDTH - 1
    return [
        Text.assemble(
            (head, "bold"), " ", phrases.ends(text, room - len(head)), overflow="ellipsis", no_wrap=True
        )
        for head, text in ((head, prompt), ("answer:", completion))
    ]


def _replicas(status: Status, width: int) -> RenderableType:
    if not status.replicas.by_name:
        return Group()
    table = Table(box=None, padding=(0, 2 if width >= _NARROW else 1, 0, 0), header_style="dim")
    table.add_column("replica", no_wrap=True)
    for name in ("version", "running", "waiting", "KV", "idle", "generated"):
        table.add_column(name, justify="right", no_wrap=True)
    present = {name: history for name, history in status.replicas.by_name.items() if not history.left}
    for name, history in sorted(present.items()):
        table.add_row(*_replica_row(name, history), style=None if history.alive else "red")
    return table


def _replica_row(name: str, history: ReplicaHistory) -> list[str]:
    latest = history.latest
    if not latest:
        return [name, "starting" if history.alive else "dead", *[""] * 5]
    kv = latest["kv_used_tokens"] / max(latest["kv_capacity_tokens"], 1)
    return [
        name,
        f"v{latest['version']}" if history.alive else "dead",
        str(latest["running"]),
        str(latest["waiting"]),
        phrases.percent(kv),
        phrases.percent(history.idle_fraction),
        f"{history.generated_tokens:,}",
    ]
