"""Several runs side by side: their figures and the keys that differ, as text and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from millrace.api.plain_records import RunComparison
from millrace.observe.terminal import sparkline
from millrace.run.resume import ABSENT, diff
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.drawing import fragments
from millrace_ui.drawing.fragments import spark
from millrace_ui.overview import Overview, overviews
from millrace_ui.record.steps import curve, newest_figures

POINTS = 60
NAME_MAX, HEADING_MAX, CELL_MIN = 40, 36, 12
"""Characters of a run's name beside its curve, of a row's heading, and of a run's column."""


def side_by_side(runs: Sequence[RunDirectory], points: int = POINTS) -> RunComparison:
    """Read the runs to their ends. `points`: of a curve, at most."""
    views = overviews(runs)
    for view in views:
        view.update(read_s=float("inf"))
    return RunComparison(**comparison_record(views, points))


def tables(compared: RunComparison, width: int) -> Iterator[RenderableType]:
    """The comparison as text of at most `width` columns."""
    differ, num_runs = configuration(compared), len(compared.runs)
    yield _curves(compared.reward, width)
    yield from _side_by_side(compared.figures | {"": [""] * num_runs} | differ, num_runs, width)
    if not differ:
        yield Text("Their configurations are equal.")


def html(compared: RunComparison) -> str:
    """The comparison in a notebook."""
    curves = [fragments.Raw(spark(y, 260, 60)) if y else "" for y in compared.reward.values()]
    values = compared.figures | configuration(compared)
    rows = [("reward", *curves), *((name, *map(_cell, row)) for name, row in values.items())]
    return fragments.table(("", *compared.runs), rows)


def configuration(compared: RunComparison) -> dict[str, list[Any]]:
    """The keys that differ, and their values in each run."""
    changes = [change for each in compared.differences.values() for change in each]
    differ = {change["key"]: change["old"] for change in changes}
    own = [
        {change["key"]: change["new"] for change in compared.differences.get(name, ())}
        for name in compared.runs
    ]
    return {key: [run.get(key, first) for run in own] for key, first in differ.items()}


def _curves(rewards: dict[str, list[float]], width: int) -> Table:
    """A line for each run, with the number that stands for the run in the tables below."""
    room = width - min(NAME_MAX, max(map(len, rewards))) - len(str(len(rewards))) - 4
    rewards = {name: curve(range(len(y)), y, max(2, room)).y for name, y in rewards.items()}
    every = [value for values in rewards.values() for value in values] or [0.0]
    least, most = min(every), max(every)
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("run", max_width=NAME_MAX, overflow="fold")
    table.add_column(f"reward, {least:.3g} to {most:.3g}", overflow="fold")
    for number, (name, values) in enumerate(rewards.items(), 1):
        table.add_row(str(number), Text(name), sparkline(values, least, most))
    return table


def _side_by_side(values: dict[str, list[Any]], num_runs: int, width: int) -> Iterator[Table]:
    """A row for each name and a column for each run. If the width has no room for all runs, several tables
    follow each other."""
    heading_width = min(HEADING_MAX, max(map(len, values))) + 2
    at_once = min(num_runs, max(1, (width - heading_width) // (CELL_MIN + 2)))
    for first in range(0, num_runs, at_once):
        table = Table(box=None, pad_edge=False, title=" ")
        table.add_column("", max_width=HEADING_MAX, overflow="fold")
        runs = range(first, min(first + at_once, num_runs))
        for run in runs:
            table.add_column(str(run + 1), justify="right", overflow="fold")
        for name, row in values.items():
            table.add_row(name, *(Text(_cell(row[run])) for run in runs))
        yield table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else "not there" if value is ABSENT else str(value)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of each run, in the order of the runs."""

    name: str
    values: tuple[Any, ...]


_FIGURES: dict[str, Sequence[str]] = {
    "steps": ("steps",),
    "wall time (s)": ("wall_s",),
    "reward, first tenth of the steps": ("reward_first",),
    "reward, last tenth": ("reward_last",),
    "trained tokens/s": ("trained_tokens_per_s",),
    "generated tokens/s": ("generated_tokens_per_s",),
    "mean staleness": ("staleness", "mean"),
    "largest staleness": ("staleness", "max"),
    "fairness of the last batches": ("fairness",),
    "log-prob gap at staleness 0, mean": ("logprob_gap_staleness0", "mean"),
    "trainer idle": ("trainer_idle_fraction",),
    "replicas idle": ("replica_idle_fraction",),
    "restarts": ("restarts",),
    "trajectories trained": ("accounting", "trained"),
    "trajectories failed": ("accounting", "failed"),
    "trajectories stale": ("accounting", "stale"),
}


def figures_of(runs: Sequence[Overview]) -> list[Figure]:
    """The figures of the summaries. A live run has a summary too."""
    summaries = [run.story.summary() for run in runs]
    figures = [Figure(name, tuple(_at(one, path) for one in summaries)) for name, path in _FIGURES.items()]
    evaluated = [newest_figures(run.run, run.config) for run in runs]
    names = dict.fromkeys(name for one in evaluated for name in one)
    at = list(_FIGURES).index("reward, last tenth") + 1
    figures[at:at] = [Figure(name, tuple(one.get(name) for one in evaluated)) for name in names]
    parents = tuple(run.parent and str(run.parent) for run in runs)
    return [Figure("began with", parents), *figures] if any(parents) else figures


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value[key]
    return value


def comparison_record(runs: Sequence[Overview], points: int) -> dict[str, Any]:
    """The output of `millrace compare` as JSON types. Each run is compared with the first."""
    first = runs[0]
    return {
        "runs": [run.name for run in runs],
        "figures": {figure.name: list(figure.values) for figure in figures_of(runs)},
        "reward": {run.name: run.steps.curve("reward/mean", points=points).y for run in runs},
        "differences": {
            run.name: [
                {"key": change.key, "old": change.old, "new": change.new}
                for change in diff(first.config, run.config)
            ]
            for run in runs[1:]
        },
    }
