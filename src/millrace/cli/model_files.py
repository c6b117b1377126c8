"""`millrace import`, `text-part`, `dequantize`, `export`, `convert`: a model directory or a checkpoint made
of other files. A run goes on with the converted checkpoint of another trainer.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.options import Run
from millrace.core.errors import DataError
from millrace.core.wings import wing
from millrace.observe.terminal import Terminal
from millrace.run_directory import run_directory
from millrace.run_directory.models import export, has_jax, origin, run_with_jax

Model = Annotated[Path, typer.Argument(metavar="MODEL", show_default=False)]
Directory = Annotated[Path, typer.Argument(metavar="DIRECTORY", show_default=False)]
console = Terminal(soft_wrap=True)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", show_default=False)], directory: Directory
) -> None:
    """Write a model in one GGUF file as a directory in float32, and show that it speaks."""
    if not file.is_file():
        raise DataError(f"there is no file {file}")
    from millrace.trainer.files.gguf import import_gguf

    found = import_gguf(file, directory)
    console.print(f"{found.family}, {found.parameters / 1e6:,.1f} million parameters, {found.license}")
    console.print(f"log-prob of a sentence: {found.log_prob:.2f} nats a token; of a guess: {found.guess:.2f}")
    console.print(f"ends of a turn: {' '.join(found.ends)}")
    console.print(f"asked: {found.prompt!r}\nanswer: {found.answer!r}{'' if found.ended else ' ... (cut)'}")
    if not math.isfinite(found.log_prob) or found.log_prob < found.guess:
        console.print("It knows less than a guess: a model that was never trained, or a damaged file")
    _say("The model", directory)


def text_part(model: Model, directory: Directory) -> None:
    """Write the text part of a model of images and text, such as Gemma 3 or Mistral Small 3.1."""
    from millrace.trainer.files.rewritten import write_text_part

    write_text_part(model, directory)
    _say("The text part", directory)


def dequantize(model: Model, directory: Directory) -> None:
    """Write a model with mxfp4 weights, such as gpt-oss, in bfloat16, to train it."""
    from millrace.trainer.files.rewritten import dequantize

    dequantize(model, directory)
    _say("The model", directory)


def _say(what: str, directory: Path) -> None:
    console.print(f"{what} is in {directory}. In a configuration: [model] path = {str(directory)!r}")


# ---------------------------------------------------------------- export


def export_model(
    run: Run,
    version: Annotated[
        int | None, typer.Option(min=1, help="Of which checkpoint. Default: the newest.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/exports/vNNNNNNNN.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, as peft reads it.")] = False,
    master: Annotated[
        bool, typer.Option("--master", help="The trainer's own weights, in float32 and not rounded.")
    ] = False,
) -> None:
    """Write the model of a checkpoint, also while the run goes on."""
    chosen, target = export(run_directory.find(run), version, out, adapter=adapter, master=master)
    typer.echo(f"Version {chosen}: {target}")


# ---------------------------------------------------------------- convert


class Backend(StrEnum):
    TORCH = "torch"
    JAX = "jax"


def convert_checkpoint(
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
