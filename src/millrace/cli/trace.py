"""`millrace trace`: a run as a timeline for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.options import Run
from millrace.core.errors import OTHER_FILE, DataError, boundary, writing
from millrace.observe.sinks.jsonl import read_events
from millrace.observe.sinks.log_files import parts
from millrace.observe.timeline import chrome_trace
from millrace.run_directory import run_directory


def command(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write a run's timeline. Open the file at ui.perfetto.dev, or in chrome://tracing."""
    events = run_directory.find(run).events
    if not parts(events):
        raise DataError(f"{events} is not there: a trace is made of the events that a run wrote")
    with boundary(str(events), "its events do not make sense together", DataError):
        text = json.dumps(chrome_trace(read_events(events)))
    with writing(out, OTHER_FILE):
        out.write_text(text, encoding="utf-8")
    typer.echo(f"{out}: {len(text):,} bytes")
