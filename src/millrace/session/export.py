"""Models out of a run: of its end, or of any checkpoint that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from millrace.core.errors import DataError
from millrace.ledger.reader import LedgerReader
from millrace.session.run_directory import RunDirectory

CHECKPOINT = "optimizer.safetensors"
"""A file that a checkpoint has and a model directory has not."""


def export(run: RunDirectory, version: int, out: Path) -> None:
    """Write the model of a checkpoint as a Hugging Face directory, like the one that a run ends with.

    Raises: DataError: there is no such checkpoint, or it is damaged; `out` holds something else.
    """
    kept = versions(run)
    if version not in kept:
        there = f"it keeps {', '.join(map(str, kept))}" if kept else "it keeps none yet"
        raise DataError(
            f"{run.path} has no checkpoint of version {version}: {there}.\n"
            "  `checkpoints.every` and `checkpoints.keep` say which are kept"
        )
    _write(run, run.checkpoints / f"v{version:08d}", out)


def versions(run: RunDirectory) -> list[int]:
    """Of its checkpoints, the oldest first."""
    names = (path.name[1:] for path in run.checkpoints.glob("v????????"))
    return sorted(int(name) for name in names if name.isdigit())


def origin(path: Path) -> tuple[RunDirectory, int] | None:
    """The run and the version of a model that `model_directory` would take; None: no run made the model."""
    path = path.resolve()
    run = next((run for run in map(RunDirectory, (path, *path.parents[:2])) if run.ledger.is_file()), None)
    if run is None:
        return None
    if path.parent == run.checkpoints and path.name[1:].isdigit():
        return run, int(path.name[1:])
    if path in (run.path, run.model) and (run.model / "config.json").is_file():
        with LedgerReader(run.ledger) as reader:
            return run, reader.overview().version
    return (run, versions(run)[-1]) if path == run.path and versions(run) else None


@contextmanager
def model_directory(path: Path) -> Iterator[Path]:
    """The Hugging Face directory of a model, of a checkpoint, or of a run (of its end, or newest checkpoint).

    Of a checkpoint it is made for the time of the block.

    Raises: DataError: a run without a checkpoint, or a damaged one.
    """
    run = RunDirectory(path.resolve())
    if run.ledger.is_file() and (run.model / "config.json").is_file():
        yield run.model
        return
    if run.ledger.is_file():
        if not versions(run):
            raise DataError(
                f"{path} has no model yet: its first checkpoint comes after `checkpoints.every` steps"
            )
        path = run.checkpoints / f"v{versions(run)[-1]:08d}"
    if not (path / CHECKPOINT).is_file():
        yield path
        return
    with TemporaryDirectory(prefix="millrace-") as scratch:
        _write(RunDirectory(path.resolve().parents[1]), path, Path(scratch) / "model")
        yield Path(scratch) / "model"


def _write(run: RunDirectory, checkpoint: Path, out: Path) -> None:
    from millrace.trainer.export import export_checkpoint

    model = run.read_config().model
    export_checkpoint(checkpoint, out, model_path=model.path, dtype=model.dtype)
