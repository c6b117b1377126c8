"""`millrace convert`: a checkpoint of one trainer for the other, so that a run goes on with it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millrace.core.errors import DataError
from millrace.core.wings import wing
from millrace.run_directory.models import has_jax, origin, run_with_jax


class Backend(StrEnum):
    TORCH = "torch"
    JAX = "jax"


def command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", show_default=False)],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory of checkpoints.", show_default=False)
    ],
    to: Annotated[Backend, typer.Option(help="Which `trainer.backend` will read it.")],
) -> None:
    """Rewrite a checkpoint for the trainer in torch or in JAX, moments included. OUT may be where it is."""
    found = origin(checkpoint)
    if found is not None and out.resolve() == checkpoint.resolve().parent and found[0].is_owned():
        raise DataError(f"{found[0].path} trains: stop it, or convert to another directory")
    if not has_jax():
        python = None if found is None else found[0].read_config().trainer.python
        typer.echo(run_with_jax(python, "convert", checkpoint, out, "--to", to.value), nl=False)
        return
    convert = wing("jax.convert")
    typer.echo(f"For {to.value}: {convert(checkpoint, out, to.value)}")
