"""Options and output that several commands share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.", show_default=False)]
Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run, or the newest in a directory of runs.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the configuration. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Runs, the first is compared with.", show_default=False)
]


def answers_alone() -> None:
    """From now on only `answers` writes to the standard output of this process. What a user's code, a library
    or a process of theirs prints goes to the standard error."""
    global _answers
    sys.stdout.flush()
    _answers = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)


def answers() -> TextIO:
    """The stream of what the command was asked for."""
    return _answers or sys.stdout


def print_json(value: Any, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, indent=indent), file=answers())


_answers: TextIO | None = None
