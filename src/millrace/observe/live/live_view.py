"""The live view of a run: on a terminal a panel that refreshes itself, elsewhere plain lines."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from millrace.core import clock
from millrace.core.events import Event
from millrace.observe.live import phrases
from millrace.observe.live.panel import render
from millrace.observe.live.status import Status
from millrace.observe.terminal import Terminal, can_redraw

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
