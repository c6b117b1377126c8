"""`millrace dequantize`: a model with mxfp4 weights, in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.observe.terminal import Terminal

console = Terminal(soft_wrap=True)


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", show_default=False)],
) -> None:
    """Write a model with mxfp4 weights, such as gpt-oss, in bfloat16, to train it."""
    from millrace.trainer.files.mxfp4 import dequantize

    dequantize(model, directory)
    console.print(f"The model is in {directory}. In a configuration: [model] path = {str(directory)!r}")
