"""`millrace report`: one or several runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.options import Runs
from millrace.run_directory import run_directory


def command(
    runs: Runs,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write runs into one HTML file that needs no server: curves, findings, samples, configuration."""
    from millrace_ui.run_report import report_runs

    size = report_runs([run_directory.find(run) for run in runs], out)
    typer.echo(f"{out}: {size:,} bytes")
