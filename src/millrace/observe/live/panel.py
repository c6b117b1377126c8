"""The live view's panel: the state of a run for a terminal of a given width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.observe.live import phrases
from millrace.observe.live.status import Status
from millrace.observe.replica_times import ReplicaHistory
from millrace.observe.terminal import sparkline

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
