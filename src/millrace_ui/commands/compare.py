"""`millrace compare`: two or more runs side by side, in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.cli.options import AsJson, Runs, print_json
from millrace.observe.terminal import Terminal
from millrace.run_directory import run_directory


def command(
    runs: Runs,
    as_json: AsJson = False,
    points: Annotated[int, typer.Option(min=2, help="Points of the reward curve at most.")] = 60,
) -> None:
    """Compare runs: figures, the curve of rewards, and which keys of the configuration differ."""
    from millrace_ui.side_by_side import side_by_side

    if len(runs) < 2:
        raise typer.BadParameter("name at least two runs")
    compared = side_by_side([run_directory.find(run) for run in runs], points)
    if as_json:
        print_json(compared.to_json())
    else:
        Terminal().print(compared)
