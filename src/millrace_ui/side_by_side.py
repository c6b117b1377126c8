"""Several runs side by side, to print, to show in a notebook or to read field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from millrace.observe.sparkline import sparkline
from millrace.observe.terminal import as_text
from millrace.run_directory.resume import ABSENT
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.comparison import comparison_record
from millrace_ui.drawing import fragments
from millrace_ui.drawing.spark import spark
from millrace_ui.overview import overviews
from millrace_ui.record.steps import curve

POINTS = 60
NAME_MAX, HEADING_MAX, CELL_MIN = 40, 36, 12
"""Characters of a run's name beside its curve, of a row's heading, and of a run's column."""
WIDTH = 110


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side. Its text is what `millrace compare` prints.

    `figures`: the values of each figure, in the order of `runs`. `reward`: the curve of each run.
    `differences`: the keys of the configuration in which a run differs from the first, with `key`, `old` and
    `new`.
    """

    runs: list[str]
    figures: dict[str, list[Any]]
    reward: dict[str, list[float]]
    differences: dict[str, list[dict[str, Any]]]

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON types."""
        return dict(json.loads(json.dumps(asdict(self), default=str)))

    def __str__(self) -> str:
        return as_text(self, WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        differ = self._configuration()
        yield _curves(self.reward, options.max_width)
        yield from _side_by_side(
            self.figures | {"": [""] * len(self.runs)} | differ, len(self.runs), options.max_width
        )
        if not differ:
            yield Text("Their configurations are equal.")

    def _repr_html_(self) -> str:
        curves = [fragments.Raw(spark(y, 260, 60)) if y else "" for y in self.reward.values()]
        values = self.figures | self._configuration()
        rows = [("reward", *curves), *((name, *map(_cell, row)) for name, row in values.items())]
        return fragments.table(("", *self.runs), rows)

    def _configuration(self) -> dict[str, list[Any]]:
        """The keys that differ, and their values in each run."""
        differ = {change["key"]: change["old"] for changes in self.differences.values() for change in changes}
        own = [
            {change["key"]: change["new"] for change in self.differences.get(name, ())} for name in self.runs
        ]
        return {key: [run.get(key, first) for run in own] for key, first in differ.items()}


def side_by_side(runs: Sequence[RunDirectory], points: int = POINTS) -> RunComparison:
    """Read the runs to their ends. `points`: of a curve, at most."""
    views = overviews(runs)
    for view in views:
        view.update(read_s=float("inf"))
    return RunComparison(**comparison_record(views, points))


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
