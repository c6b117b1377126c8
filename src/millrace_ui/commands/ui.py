"""`millrace ui`: runs in a browser, live while they go."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from millrace.core.errors import ConfigError, DataError
from millrace.run_directory.run_directory import RUNS
from millrace.runtime.process import heeded

NICE = 10
"""Training goes first if both need the same core."""


def command(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS]", help="A run, or a directory of runs.")] = RUNS,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
) -> None:
    """Show runs in a browser, on this machine only. Ctrl-C ends it; no run is disturbed."""
    from millrace_ui.record.runs import find_runs

    if runs.is_file():
        raise DataError(f"{runs} is a file.\n  Name a run, or a directory of runs")
    try:
        find_runs(runs)
    except DataError:
        typer.echo(f"There is no run in {runs} yet: the page shows the first one when it starts.")
    os.nice(NICE)
    asyncio.run(_serve(runs, port))


async def _serve(runs: Path, port: int) -> None:
    """Serves until an interrupt."""
    from millrace_ui.server import Ui
    from millrace_ui.site import Site

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in heeded():
        loop.add_signal_handler(number, ended.set)
    try:
        ui = Ui(lambda base: Site(runs, base), port)
    except OSError as error:
        raise ConfigError(f"port {port} of this machine cannot be used: {error.strerror}") from error
    typer.echo(f"{ui.url}\nOpen this address in a browser. Who knows it can read these runs. Ctrl-C ends it.")
    await ended.wait()
    ui.close()
