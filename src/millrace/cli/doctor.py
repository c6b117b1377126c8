"""`millrace doctor`: faults of a run, their evidence and their remedies."""

from __future__ import annotations

import json
from typing import Any

import typer

from millrace.cli.options import AsJson, Run
from millrace.compose.examine import examine
from millrace.observe.doctor.rules import RULES
from millrace.observe.terminal import Terminal
from millrace.run_directory import run_directory


def command(run: Run, as_json: AsJson = False) -> None:
    """Look for known faults in a run, live or ended. Exit code 1 if there is one."""
    record = examine(run_directory.find(run))
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        _print(record)
    if record["findings"]:
        raise typer.Exit(1)


def _print(record: dict[str, Any]) -> None:
    console = Terminal(soft_wrap=True)
    head = ("run", "steps", "schedule", "dtype", "end")
    for name in head:
        console.print(f"{name:10} {record[name]}")
    for line in record["inert"]:
        console.print(f"{'note':10} {line}")
    if record["healthy"]:
        console.print(f"\nNone of {len(RULES)} known faults.", style="green")
    for line in record["withdrawn"]:
        console.print(f"  {line}")
    for finding in record["findings"]:
        console.print(f"\n{finding['fault']}", style="bold red")
        for line in finding["evidence"]:
            console.print(f"  it shows: {line}")
        for line in finding["advice"]:
            console.print(f"  change:   {line}")
