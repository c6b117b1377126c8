"""Options that several commands share."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

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


def typed() -> str:
    """The command that started this process, for hints that a user can paste.

    `millrace` if the shell finds this program under that name, else its path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join([sys.executable, "-m", "millrace"])
    path = shutil.which("millrace")
    if program.name != "millrace" or (path is not None and Path(path).resolve() == program.resolve()):
        return "millrace"
    return shlex.quote(sys.argv[0])
