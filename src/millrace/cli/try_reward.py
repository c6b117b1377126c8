"""`millrace try-reward`: what the reward says of answers whose worth is known, before it is trained on."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli.options import AsJson, ConfigFile, Overrides
from millrace.config.load import load
from millrace.evaluation.trials import judge, run_trials
from millrace.observe.terminal import Terminal

TEXT_SHOWN, PROMPT_SHOWN = 32, 1000
WIDTHS = {"row": 18, "": 24, "value": 16}
"""Columns of a terminal of 80, with what the others need."""


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("-n", min=1, help="How many rows of the task.")] = 8,
    completion: Annotated[list[str] | None, typer.Option(help="Also try this text. Repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Call the reward on right, empty and odd answers, and judge it. Exit code 1 if a call fails."""
    results = run_trials(load(config_file, overrides or ()), rows, completion or [])
    warnings = list(judge(results))
    if as_json:
        typer.echo(json.dumps({"trials": results, "warnings": warnings}, indent=2))
    else:
        _print(results, warnings)
    if any(r["outcome"] == "failed" for r in results):
        raise typer.Exit(1)


def _print(results: list[dict[str, Any]], warnings: list[str]) -> None:
    console = Terminal(soft_wrap=True)
    first = results[0]
    console.print(f"The prompt of {first['row']}, {first['prompt_tokens']} tokens:", style="bold")
    for line in first["prompt"][:PROMPT_SHOWN].splitlines() or [""]:
        console.print(f"  | {line}", markup=False)
    console.print()
    console.print(_table(results))
    for warning in warnings:
        console.print(f"Warning: {warning}.", style="yellow")


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("row", "completion", "", "outcome", "value", "seconds"):
        table.add_column(name, overflow="fold", max_width=WIDTHS.get(name))
    for r in results:
        shown = (
            r["completion"] if len(r["completion"]) <= TEXT_SHOWN else r["completion"][:TEXT_SHOWN] + "..."
        )
        value = "" if r["value"] is None else f"{r['value']:g}"
        detail = value or r["reason"]
        cells = (_short(r["row"]), r["kind"], repr(shown), r["outcome"], detail, f"{r['seconds']:.3f}")
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _short(row_id: str) -> str:
    """Its end, which tells rows apart."""
    limit = WIDTHS["row"]
    return row_id if len(row_id) <= limit else "..." + row_id[3 - limit :]
