"""`millrace text-part`: the text part of a model that also reads images."""

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
    """Write the text part of a model of images and text, such as Gemma 3 or Mistral Small 3.1."""
    from millrace.trainer.files.text_part import write_text_part

    write_text_part(model, directory)
    console.print(f"The text part is in {directory}. In a configuration: [model] path = {str(directory)!r}")
