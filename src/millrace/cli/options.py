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
    """The command as this process was started, so that a hint can be pasted: `millrace` where the shell would
    find this one, else its path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join([sys.executable, "-m", "millrace"])
    found = shutil.which("millrace")
    if program.name != "millrace" or (found is not None and Path(found).resolve() == program.resolve()):
        return "millrace"
    return shlex.quote(sys.argv[0])
