"""`millrace compare`: two or more runs side by side, in the terminal."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from millrace.cli.options import AsJson, Runs
from millrace.cli.report import distinct
from millrace.observe.terminal import Terminal
from millrace.session import run_directory

POINTS = 60
"""Columns of a curve in the terminal."""
BLOCKS = "▁▂▃▄▅▆▇█"


def command(
    runs: Runs,
    as_json: AsJson = False,
    points: Annotated[int, typer.Option(min=2, help="Columns of the reward curve.")] = POINTS,
) -> None:
    """Compare runs: figures, the curve of rewards, and which keys of the configuration differ."""
    from millrace.look.comparison import told_of
    from millrace.look.overview import Overview

    if len(runs) < 2:
        raise typer.BadParameter("name at least two runs")
    found = [run_directory.find(run) for run in runs]
    names = distinct([run.path for run in found])
    views = [Overview(name, run) for name, run in zip(names, found, strict=True)]
    for view in views:
        view.update(read_s=float("inf"))
    told = told_of(views, points)
    if as_json:
        typer.echo(json.dumps(told, indent=2, default=str))
    else:
        Terminal().print(_rendered(told))


def _rendered(told: dict[str, Any]) -> Group:
    names = told["runs"]
    figures = _table(("", *names), [(name, *values) for name, values in told["figures"].items()])
    curves = told["reward"]
    least = min((min(y) for y in curves.values() if y), default=0.0)
    most = max((max(y) for y in curves.values() if y), default=1.0)
    drawn = _table(
        ("reward", f"{least:.3g} to {most:.3g}"), [(n, _bars(y, least, most)) for n, y in curves.items()]
    )
    differ = [
        (change["key"], name, change["old"], change["new"])
        for name, changes in told["differences"].items()
        for change in changes
    ]
    head = ("configuration", "run", names[0], "there")
    tail = _table(head, differ) if differ else Text("Their configurations are equal.")
    return Group(figures, Text(), drawn, Text(), tail)


def _bars(values: list[float], least: float, most: float) -> str:
    scale = (len(BLOCKS) - 1) / ((most - least) or 1.0)
    return "".join(BLOCKS[round((value - least) * scale)] for value in values)


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    return table


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "-" if value is None else str(value)
