"""`millrace import`, `text-part`, `dequantize`: a model directory made of other files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from millrace.core.errors import DataError
from millrace.observe.terminal import Terminal

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
