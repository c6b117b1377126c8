"""`millrace fetch`: a model or a data set of the Hugging Face hub, or of its mirror, as a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.checks.model_problems import model_problems
from millrace.core.errors import DataError
from millrace.observe.terminal import Terminal
from millrace.tasks.hub import hub_reason

MODEL = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md")
"""Files of a model's repository, without copies of the weights in other formats."""
ROWS = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv")
DATA = (*ROWS, "*.arrow", "LICENSE*", "README.md")
"""Files of a data set's repository."""

console = Terminal(soft_wrap=True)


def command(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", show_default=False)],
    to: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Where to. Default: models/NAME or data/NAME.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    data: Annotated[bool, typer.Option("--data", help="A data set in place of a model.")] = False,
) -> None:
    """Fetch a model or data set from the Hugging Face hub, or from the mirror that `HF_ENDPOINT` names."""
    if name.count("/") != 1 or not all(name.split("/")):
        raise typer.BadParameter(f"{name!r} is no OWNER/NAME", param_hint="OWNER/NAME")
    directory = to or Path("data" if data else "models") / name.partition("/")[2]
    fetch(name, directory, revision, data=data)
    if data:
        _print_data(name, directory)
        return
    if problems := list(model_problems(directory)):
        raise DataError("\n".join([f"{name} was fetched into {directory}, and cannot be used:", *problems]))
    console.print(f"{name} is in {directory}. In a configuration: [model] path = {str(directory)!r}")


def fetch(name: str, directory: Path, revision: str | None, *, data: bool = False) -> None:
    """Fetch a repository. Whole files that exist already stay. Raises: DataError: fetching failed, with the
    reason."""
    import huggingface_hub

    try:
        huggingface_hub.snapshot_download(
            name,
            repo_type="dataset" if data else "model",
            revision=revision,
            local_dir=directory,
            allow_patterns=list(DATA if data else MODEL),
        )
    except Exception as error:
        hint = "; for a model, leave --data out" if data else "; for a data set, add --data"
        raise DataError(hub_reason(name, error, data=data, hint=hint)) from error


def _print_data(name: str, directory: Path) -> None:
    visible = [path for path in sorted(directory.rglob("*")) if ".cache" not in path.parts]
    files = [path for path in visible if any(path.match(pattern) for pattern in ROWS)]
    if not files:
        raise DataError(
            f"{name} was fetched into {directory}, and has no file of rows ({' '.join(ROWS)}).\n"
            "  Is it a data set that a script makes? Write its rows as JSON lines yourself"
        )
    console.print(f"{name} is in {directory}. In a configuration, one of:")
    for path in files:
        console.print(f"  [task] path = {str(path)!r}  # {path.stat().st_size / 1e6:,.1f} MB")
