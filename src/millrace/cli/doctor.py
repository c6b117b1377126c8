"""`millrace doctor`: what is wrong with a run, what shows it, what to change."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from millrace.cli import run_directory
from millrace.cli.options import AsJson, Run
from millrace.cli.run_directory import RunDirectory
from millrace.core.errors import DataError
from millrace.ledger.reader import LedgerReader
from millrace.observe.doctor import RULES, diagnose
from millrace.observe.doctor_evidence import Evidence
from millrace.observe.jsonl import read_events


def command(run: Run, as_json: AsJson = False) -> None:
    """Look for known faults in a run, live or ended. Exit code 1 if there is one."""
    told = examine(run_directory.find(run))
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        _print(told)
    if told["findings"]:
        raise typer.Exit(1)


def examine(run: RunDirectory) -> dict[str, Any]:
    """JSON types. Raises: DataError, ConfigError, LedgerError: a record is missing or damaged."""
    config = run.read_config()
    if not run.events.is_file():
        raise DataError(f"{run.path} has no events.jsonl: the doctor reads what a run told while it ran")
    evidence = Evidence(config.model.dtype)
    for event in read_events(run.events):
        evidence(event)
    with LedgerReader(run.ledger) as reader:
        evidence.failures.clear()
        evidence.failures.update(
            {why: num for (state, why), num in reader.reasons().items() if state == "failed"}
        )
        committed = reader.run_state().version
    return {
        "run": str(run.path),
        "steps": len(evidence.by_version),
        "committed": committed,
        "schedule": config.schedule.kind,
        "dtype": config.model.dtype,
        "end": evidence.end or "it goes on, or was killed",
        "healthy": not (findings := diagnose(evidence)),
        "findings": [asdict(finding) for finding in findings],
    }


def _print(told: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    head = ("run", "steps", "schedule", "dtype", "end")
    for name in head:
        console.print(f"{name:10} {told[name]}", markup=False)
    if told["healthy"]:
        console.print(f"\nNone of {len(RULES)} known faults.", style="green")
    for finding in told["findings"]:
        console.print(f"\n{finding['fault']}", style="bold red")
        for line in finding["evidence"]:
            console.print(f"  it shows: {line}", markup=False)
        for line in finding["advice"]:
            console.print(f"  change:   {line}", markup=False)
