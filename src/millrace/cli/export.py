"""`millrace export`: the model of any checkpoint of a run, as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.options import Run
from millrace.run_directory import run_directory
from millrace.run_directory.models import export


def command(
    run: Run,
    version: Annotated[
        int | None, typer.Option(min=1, help="Of which checkpoint. Default: the newest.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/exports/vNNNNNNNN.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, as peft reads it.")] = False,
    master: Annotated[
        bool, typer.Option("--master", help="The trainer's own weights, in float32 and not rounded.")
    ] = False,
) -> None:
    """Write the model of a checkpoint, also while the run goes on."""
    chosen, target = export(run_directory.find(run), version, out, adapter=adapter, master=master)
    typer.echo(f"Version {chosen}: {target}")
