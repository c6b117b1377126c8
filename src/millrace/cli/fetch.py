"""`millrace fetch`: a model of the Hugging Face hub, or of its mirror, as a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from millrace.core.errors import DataError
from millrace.observe.terminal import Terminal
from millrace.session.model_files import model_problems

WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md")
"""Files of a repository: no second copy of the weights in another format."""

console = Terminal(soft_wrap=True)


def command(
    name: Annotated[str, typer.Argument(metavar="OWNER/MODEL", show_default=False)],
    to: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Where to. Default: models/MODEL.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
) -> None:
    """Fetch a model from the Hugging Face hub, or from the mirror that `HF_ENDPOINT` names."""
    if name.count("/") != 1 or not all(name.split("/")):
        raise typer.BadParameter(f"{name!r} is no OWNER/MODEL", param_hint="OWNER/MODEL")
    directory = to or Path("models") / name.partition("/")[2]
    fetch(name, directory, revision)
    if problems := list(model_problems(directory)):
        raise DataError("\n".join([f"{name} was fetched into {directory}, and cannot be used:", *problems]))
    console.print(f"{name} is in {directory}. In a configuration: [model] path = {str(directory)!r}")


def fetch(name: str, directory: Path, revision: str | None) -> None:
    """Whole files that are there already stay. Raises: DataError: it could not be fetched, and why."""
    import huggingface_hub

    try:
        huggingface_hub.snapshot_download(
            name, revision=revision, local_dir=directory, allow_patterns=list(WANTED)
        )
    except Exception as error:
        raise DataError(_told(name, error)) from error


def _told(name: str, error: Exception) -> str:
    """By the name of the error: each has a remedy of its own."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    where = os.environ.get("HF_ENDPOINT", "the Hugging Face hub")
    if "GatedRepoError" in kinds:
        remedy = "Accept its terms on its page, then `hf auth login`, or set HF_TOKEN."
    elif "RevisionNotFoundError" in kinds:
        remedy = "There is no such revision: leave --revision out, or correct it."
    elif "RepositoryNotFoundError" in kinds:
        remedy = "There is no such model, or it is private: correct the name, or set HF_TOKEN."
    elif "OSError" in kinds and not kinds & {"ConnectionError", "HTTPError", "LocalEntryNotFoundError"}:
        remedy = "Free space or put the permissions right, then try again: whole files stay."
    else:
        remedy = (
            "Is there a network? A mirror is named with HF_ENDPOINT. Or, on a host that reaches the hub: "
            f"`hf download {name} --local-dir DIRECTORY`, and copy that directory here."
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{name} could not be fetched from {where}: {first}\n  {remedy}"
