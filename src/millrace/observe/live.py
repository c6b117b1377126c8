"""The live view of a run: a panel that refreshes itself on a terminal, a plain line elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.core import clock
from millrace.core.events import Event
from millrace.observe.replicas import ReplicaHistory
from millrace.observe.status import Status
from millrace.observe.terminal import Terminal

_REFRESHES_PER_S = 4
_LINE_EVERY_S = 5.0
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_REWARD_WIDTH = 42  # of the reward's line without its bars, borders included
_NARROW = 74  # columns, below which facts stand under each other
_ECHO_WIDTH = 2  # room for the ^C that a terminal echoes: on a line of its own it would break the panel
_HEADING_WIDTH = 62  # of the first line without its bar


class LiveView:
    """A sink and a context manager. On a terminal that can move its cursor and show bars, rich's own thread
    redraws the newest status; else a line is printed at most every few seconds, when something happens, and
    at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.status = Status()
        self._console = console or Terminal()
        self._live: Live | None = None
        self._printed_wall_s = float("-inf")

    def __enter__(self) -> LiveView:
        console = self._console
        if console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
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
        if self._live is None and self._line_is_due(event):
            self._printed_wall_s = event.wall_s
            self._console.print(Text(plain_line(self.status)), soft_wrap=True)

    def _panel(self) -> RenderableType:
        if self.status.started_wall_s and self.status.ended is None:
            self.status.wall_s = clock.wall()  # time passes between events too
        return render(self.status, self._console.width)

    def _line_is_due(self, event: Event) -> bool:
        if event.kind in ("run_ended", "worker_died", "worker_recovered", "stalled"):
            return True
        return event.kind != "run_started" and event.wall_s - self._printed_wall_s >= _LINE_EVERY_S


def plain_line(status: Status) -> str:
    """The run in one line of text."""
    parts = [f"step {status.version}/{status.steps_total}", *(_progress(status) if status.stepped else [])]
    if not status.stepped and status.ended is None:
        parts.append(_starting(status))
    if status.restarts:
        parts.append(f"restarts {status.restarts} ({status.last_trouble})")
    elif status.last_trouble:
        parts.append(status.last_trouble)
    if status.ended is not None:
        parts.append(f"ended: {status.ended}")
    return " | ".join(parts)


def _progress(status: Status) -> list[str]:
    return [
        f"reward {_number(_last(status.rewards), '.3f')}",
        f"staleness {_number(status.staleness_mean, '.2f')} (max {status.staleness_max})",
        *_fairness(status),
        _speeds(status),
        f"trainer idle {_percent(status.trainer_idle_fraction)}",
        f"in flight {status.in_flight}",
        f"left {_duration(status.remaining_s)}",
    ]


def _fairness(status: Status) -> list[str]:
    """Nothing while there are too few batches."""
    return [] if status.fairness is None else [f"fairness {status.fairness:.2f}"]


def _starting(status: Status) -> str:
    """Before the first step: which workers run, and what they do."""
    if not status.ready:
        return "starting the workers"
    under_way = f"; in flight {status.in_flight}" if status.in_flight else ""
    return f"no step yet; ready: {', '.join(status.ready)}{under_way}"


def _speeds(status: Status) -> str:
    trained, generated = _number(status.trained_tokens_per_s), _number(status.generated_tokens_per_s)
    return f"tokens/s {trained} trained, {generated} generated"


def render(status: Status, width: int = 120) -> RenderableType:
    """The run as a panel for a terminal of `width` columns."""
    parts = [
        _heading(status, width),
        _reward(status, width),
        _numbers(status, width),
        _replicas(status, width),
        *(Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in _computes(status)),
    ]
    if status.last_trouble:
        parts.append(Text(status.last_trouble, style="yellow", overflow="ellipsis", no_wrap=True))
    title = f"millrace · {status.schedule or 'starting'}"
    return Panel(Group(*parts), title=title, title_align="left", width=max(width - _ECHO_WIDTH, 20))


def _computes(status: Status) -> list[str]:
    """One line for those who compute alike."""
    alike: dict[str, list[str]] = {}
    for name, told in sorted(status.computes.items()):
        alike.setdefault(told, []).append(name)
    return [f"{', '.join(names)}: {told}" for told, names in alike.items()]


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """The last values as bars between their own smallest and largest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top) if span > 0 else 0] for value in shown)


def _heading(status: Status, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    elapsed = status.wall_s - status.started_wall_s
    bar_width = min(32, max(4, width - _HEADING_WIDTH))
    grid.add_row(
        Text(f"step {status.version}/{status.steps_total}", style="bold"),
        ProgressBar(total=max(status.steps_total, 1), completed=status.version, width=bar_width),
        f"{_duration(elapsed)} elapsed",
        f"{_duration(status.remaining_s)} left" if status.ended is None else f"ended: {status.ended}",
    )
    return grid


def _reward(status: Status, width: int) -> RenderableType:
    rewards = list(status.rewards)
    if not rewards:
        ended = status.ended is not None
        return Text("no step" if ended else _starting(status), style="dim", overflow="ellipsis", no_wrap=True)
    last = f"{rewards[-1]:.3f}  ({min(rewards):.3f} to {max(rewards):.3f})"
    bars = sparkline(rewards, min(_SPARK_WIDTH, max(4, width - _REWARD_WIDTH)))
    return Text.assemble(("reward  ", "bold"), (bars, "green"), "  ", last)


def _numbers(status: Status, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    worst = "-" if status.staleness_mean is None else status.staleness_max
    staleness = f"staleness {_number(status.staleness_mean, '.2f')} mean, {worst} max"
    idle = ", ".join([f"trainer idle {_percent(status.trainer_idle_fraction)}", *_fairness(status)])
    counts = f"in flight {status.in_flight}, being scored {status.scoring}, restarts {status.restarts}"
    pairs = (staleness, _speeds(status)), (idle, counts)
    for row in pairs if width >= _NARROW else ((text,) for pair in pairs for text in pair):
        grid.add_row(*row)
    return grid


def _replicas(status: Status, width: int) -> RenderableType:
    if not status.replicas.by_name:
        return Group()
    table = Table(box=None, padding=(0, 2 if width >= _NARROW else 1, 0, 0), header_style="dim")
    table.add_column("replica", no_wrap=True)
    for name in ("version", "running", "waiting", "KV", "idle", "generated"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, history in sorted(status.replicas.by_name.items()):
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
        _percent(kv),
        _percent(history.idle_fraction),
        f"{history.generated_tokens:,}",
    ]


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
