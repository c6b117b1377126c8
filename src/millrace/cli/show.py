"""`millrace show`: a run, one of its steps or trajectories, from the ledger. Never disturbs the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from millrace.cli import views
from millrace.cli.options import AsJson
from millrace.cli.run_directory import RunDirectory
from millrace.core.errors import DataError
from millrace.ledger.reader import LedgerReader

TOKENS_SHOWN = 200


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Show the step that made this version.")] = None,
    trajectory: Annotated[int | None, typer.Option(help="Show this trajectory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run, of one step, or of one trajectory."""
    if step is not None and trajectory is not None:
        raise typer.BadParameter("--step and --trajectory exclude each other")
    if not run.is_dir():
        raise DataError(f"there is no run directory {run}")
    directory = RunDirectory(run)
    with LedgerReader(directory.ledger) as reader:
        if step is not None:
            view, render = views.step_view(reader, step), _step
        elif trajectory is not None:
            view, render = views.trajectory_view(reader, directory, trajectory), _trajectory
        else:
            view, render = views.run_view(reader, directory), _run
    if as_json:
        typer.echo(json.dumps(view, indent=2))
    else:
        Console(highlight=False).print(render(view))


def _run(view: dict[str, Any]) -> Group:
    head = {
        "run": view["run"],
        "state": view["state"],
        "version": f"{view['version']} of {view['steps']} steps",
        "schedule": view["schedule"],
        "checkpoint": view["checkpoint"] or "none yet",
        "groups": f"{view['num_groups']} ({view['num_skipped']} prompts skipped)",
        "completion tokens": f"{view['num_tokens']:,}",
    }
    ends = [(state, reason, num) for state, reason, num in view["reasons"] if reason]
    return Group(
        _pairs(head),
        _table("Trajectories", ["", ""], view["accounting"].items()),
        _table("Ended otherwise", ["state", "reason", "trajectories"], ends),
        _records("Replicas, over the last steps", view["replicas"]),
        _records("Last steps", view["last_steps"]),
    )


def _step(view: dict[str, Any]) -> Group:
    return Group(
        _pairs({"version": view["version"], "reward mean": view["reward_mean"]}),
        _table("Metrics", ["", ""], view["metrics"].items()),
        _table("Trained tokens by staleness", ["staleness", "tokens"], view["staleness"].items()),
        _records("Trajectories", view["trajectories"]),
    )


def _trajectory(view: dict[str, Any]) -> Group:
    texts = {"prompt", "completion", "tokens"}
    parts: list[Any] = [_pairs({key: value for key, value in view.items() if key not in texts})]
    for name in ("prompt", "completion"):
        if view[name] is not None:
            table = Table(title=name.capitalize(), title_justify="left", show_header=False)
            table.add_row(_plain(view[name]))
            parts.append(table)
    shown = view["tokens"][:TOKENS_SHOWN]
    rest = len(view["tokens"]) - len(shown)
    parts.append(_records("Tokens", shown))
    return Group(*parts, *([f"... and {rest} more; --json shows all"] if rest else []))


def _pairs(values: dict[str, Any]) -> Table:
    return _table("", ["", ""], values.items())


def _records(title: str, records: list[dict[str, Any]]) -> Table:
    columns = list(records[0]) if records else ["none yet"]
    return _table(title, columns, [tuple(record.values()) for record in records])


def _table(title: str, columns: list[str], rows: Any) -> Table:
    table = Table(
        *columns,
        title=title or None,
        title_justify="left",
        show_header=any(columns),
        box=None,
        pad_edge=False,
    )
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    return Text("-" if value is None else str(value))
