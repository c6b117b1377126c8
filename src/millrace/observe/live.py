"""The live view of a run: a panel that refreshes itself on a terminal, a plain line elsewhere."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.core.events import Event
from millrace.observe.replicas import ReplicaHistory
from millrace.observe.status import Status

_REFRESHES_PER_S = 4
_LINE_EVERY_S = 5.0
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48


class LiveView:
    """A sink and a context manager. On a terminal, rich's own thread redraws the newest status; else
    a line is printed at most every few seconds, when something happens, and at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.status = Status()
        self._console = console or Console()
        self._live: Live | None = None
        self._printed_wall_s = float("-inf")

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=lambda: render(self.status),
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
            self._console.print(plain_line(self.status), highlight=False, soft_wrap=True)

    def _line_is_due(self, event: Event) -> bool:
        if event.kind in ("run_ended", "worker_died", "worker_recovered", "stalled"):
            return True
        return event.kind != "run_started" and event.wall_s - self._printed_wall_s >= _LINE_EVERY_S


def plain_line(status: Status) -> str:
    """The run in one line of text."""
    reward = f"{status.rewards[-1]:.3f}" if status.rewards else "-"
    parts = [
        f"step {status.version}/{status.steps_total}",
        f"reward {reward}",
        f"staleness {_number(status.staleness_mean, '.2f')} (max {status.staleness_max})",
        f"tokens/s {_number(status.trained_tokens_per_s)} trained, "
        f"{_number(status.generated_tokens_per_s)} generated",
        f"trainer idle {_percent(status.trainer_idle_fraction)}",
        f"in flight {status.in_flight}",
        f"left {_duration(status.remaining_s)}",
    ]
    if status.restarts:
        parts.append(f"restarts {status.restarts} ({status.last_trouble})")
    elif status.last_trouble:
        parts.append(status.last_trouble)
    if status.ended is not None:
        parts.append(f"ended: {status.ended}")
    return " | ".join(parts)


def render(status: Status) -> RenderableType:
    """The run as a panel."""
    parts: list[RenderableType] = [_heading(status), _reward(status), _numbers(status), _replicas(status)]
    if status.last_trouble:
        parts.append(Text(status.last_trouble, style="yellow", overflow="ellipsis", no_wrap=True))
    return Panel(Group(*parts), title=f"millrace · {status.schedule or 'starting'}", title_align="left")


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """The last values as bars between their own smallest and largest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top) if span > 0 else 0] for value in shown)


def _heading(status: Status) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    elapsed = status.wall_s - status.started_wall_s
    grid.add_row(
        Text(f"step {status.version}/{status.steps_total}", style="bold"),
        ProgressBar(total=max(status.steps_total, 1), completed=status.version, width=32),
        f"{_duration(elapsed)} elapsed",
        f"{_duration(status.remaining_s)} left" if status.ended is None else f"ended: {status.ended}",
    )
    return grid


def _reward(status: Status) -> RenderableType:
    rewards = list(status.rewards)
    if not rewards:
        return Text("reward  no step yet", style="dim")
    last = f"{rewards[-1]:.3f}  ({min(rewards):.3f} to {max(rewards):.3f})"
    return Text.assemble(("reward  ", "bold"), (sparkline(rewards), "green"), "  ", last)


def _numbers(status: Status) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"staleness {_number(status.staleness_mean, '.2f')} mean, {status.staleness_max} max",
        f"tokens/s {_number(status.trained_tokens_per_s)} trained, "
        f"{_number(status.generated_tokens_per_s)} generated",
    )
    grid.add_row(
        f"trainer idle {_percent(status.trainer_idle_fraction)}",
        f"in flight {status.in_flight}, being scored {status.scoring}, restarts {status.restarts}",
    )
    return grid


def _replicas(status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("replica")
    for name in ("version", "running", "waiting", "kv", "idle", "tokens"):
        table.add_column(name, justify="right")
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
