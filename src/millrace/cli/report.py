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
    from millrace.look.overview import Overview
    from millrace.look.report import write_report

    directories = [run_directory.find(run) for run in runs]
    names = distinct([run.path for run in directories])
    size = write_report([Overview(name, run) for name, run in zip(names, directories, strict=True)], out)
    typer.echo(f"{out}: {size:,} bytes")


def distinct(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(set(paths)):
        length += 1
    return ["/".join(path.parts[-length:]) for path in paths]
