"""`millrace compare`: two or more runs side by side, in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from millrace.cli.options import AsJson, Runs
from millrace.cli.report import distinct
from millrace.observe.terminal import Terminal
from millrace.run_directory import run_directory
from millrace.run_directory.resume import ABSENT

POINTS = 60
NAME_MAX, HEADING_MAX, CELL_MIN = 40, 36, 12
"""Characters of a run's name beside its curve, of a row's heading, and of a run's column."""
BLOCKS = "▁▂▃▄▅▆▇█"


def command(
    runs: Runs,
    as_json: AsJson = False,
    points: Annotated[int, typer.Option(min=2, help="Points of the reward curve at most.")] = POINTS,
) -> None:
    """Compare runs: figures, the curve of rewards, and which keys of the configuration differ."""
    from millrace.look.comparison import comparison_record
    from millrace.look.overview import Overview

    if len(runs) < 2:
        raise typer.BadParameter("name at least two runs")
    directories = [run_directory.find(run) for run in runs]
    names = distinct([run.path for run in directories])
    views = [Overview(name, run) for name, run in zip(names, directories, strict=True)]
    for view in views:
        view.update(read_s=float("inf"))
    terminal = Terminal()
    margin = min(NAME_MAX, max(map(len, names))) + len(str(len(names))) + 4
    record = comparison_record(views, points if as_json else min(points, max(2, terminal.width - margin)))
    if as_json:
        typer.echo(json.dumps(record, indent=2, default=str))
    else:
        terminal.print(_rendered(record, terminal.width))


def _rendered(record: dict[str, Any], width: int) -> Group:
    differences = record["differences"]
    differ = {change["key"]: change["old"] for changes in differences.values() for change in changes}
    own = [{change["key"]: change["new"] for change in differences.get(n, ())} for n in record["runs"]]
    configuration = {key: [run.get(key, first) for run in own] for key, first in differ.items()}
    values = record["figures"] | {"": [""] * len(own)} | configuration
    tail = [] if differ else [Text("Their configurations are equal.")]
    return Group(_curves(record["reward"]), *_side_by_side(values, len(own), width), *tail)


def _curves(rewards: dict[str, list[float]]) -> Table:
    """A line for each run, with the number that stands for the run in the tables below."""
    every = [value for curve in rewards.values() for value in curve] or [0.0]
    least, most = min(every), max(every)
    scale = (len(BLOCKS) - 1) / ((most - least) or 1.0)
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("run", max_width=NAME_MAX, overflow="fold")
    table.add_column(f"reward, {least:.3g} to {most:.3g}", overflow="fold")
    for number, (name, curve) in enumerate(rewards.items(), 1):
        bars = "".join(BLOCKS[round((value - least) * scale)] for value in curve)
        table.add_row(str(number), Text(name), bars)
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
            table.add_row(name, *(Text(_plain(row[run])) for run in runs))
        yield table


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else "not there" if value is ABSENT else str(value)
