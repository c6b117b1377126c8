"""Options that several commands share."""

from __future__ import annotations

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
