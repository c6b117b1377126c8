"""Models of a run: of its end, or of any checkpoint that the run keeps. Commands about checkpoints of the
trainer in JAX are run by the Python that has JAX: `trainer.python`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import millrace
from millrace.config.schema import Config
from millrace.conversations.tokenizer import FILES
from millrace.core import model_version
from millrace.core.errors import ConfigError, DataError
from millrace.core.wings import wing
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory
from millrace.trainer.files.checkpoint_manifest import JAX, read_manifest

CHECKPOINT = "manifest.json"
"""A file that a checkpoint has and a model directory has not."""


def export(
    run: RunDirectory,
    version: int | None = None,
    out: Path | None = None,
    *,
    adapter: bool = False,
    master: bool = False,
) -> tuple[int, Path]:
    """Write the model of a checkpoint as a Hugging Face directory, like the model at the end of a run.

    `version`: None: of the newest checkpoint. `out`: None: RUN/exports/vNNNNNNNN. `adapter`: write the
    adapter alone, in the format of peft. `master`: see `write_master`. Returns the version and the directory.

    Raises: DataError: there is no such checkpoint, or it is damaged; `out` holds something else; the run
    trains no adapter.
    """
    chosen = max(run.versions(), default=None) if version is None else version
    if chosen is None:
        raise DataError(f"{run.path} has no checkpoint yet: the first comes after `checkpoints.every` steps")
    target = out or run.exported(chosen).with_name(f"v{chosen:08d}{'-adapter' if adapter else ''}")
    _write(run, checkpoint_of(run, chosen), target, adapter=adapter, master=master)
    return chosen, target


def checkpoint_of(run: RunDirectory, version: int) -> Path:
    """Raises: DataError: there is no such checkpoint."""
    versions = run.versions()
    if version not in versions:
        there = f"it keeps {', '.join(map(str, versions))}" if versions else "it keeps none yet"
        wanted = "no checkpoint" if version < 0 else f"no checkpoint of version {version}"
        raise DataError(
            f"{run.path} has {wanted}: {there}.\n"
            "  `checkpoints.every` and `checkpoints.keep` say which are kept"
        )
    return run.checkpoint(version)


def write_master(run: RunDirectory, checkpoint: Path, out: Path) -> None:
    """Write the model of a checkpoint with the trainer's own weights, in float32: what is published is
    rounded. A merged adapter has the published numbers.

    Raises: DataError: the checkpoint is damaged, or of another model.
    """
    _write(run, checkpoint, out, master=True)


def newest(path: Path) -> Path:
    """For a run: the model of its end, or its newest checkpoint if that is newer. Other paths stay.

    Raises: DataError: the run has neither.
    """
    run = RunDirectory(path.resolve())
    if not run.ledger.is_file():
        return path
    saved = max(run.versions(), default=-1)
    if (run.model / "config.json").is_file() and model_version.read(run.model) >= saved:
        return run.model
    if saved < 0:
        raise DataError(
            f"{path} has no model yet: its first checkpoint comes after `checkpoints.every` steps"
        )
    return run.checkpoint(saved)


def origin(path: Path) -> tuple[RunDirectory, int] | None:
    """The run and the version of a model or a checkpoint; None: it belongs to no run, or has no version."""
    path = path.resolve()
    run = next((run for run in map(RunDirectory, path.parents[:2]) if run.ledger.is_file()), None)
    is_checkpoint = (path / CHECKPOINT).is_file() and path.name[1:].isdigit()
    version = int(path.name[1:]) if is_checkpoint else model_version.read(path)
    return None if run is None or version < 0 else (run, version)


@contextmanager
def model_directory(path: Path) -> Iterator[Path]:
    """The Hugging Face directory of a model, of a checkpoint, or of a run (its `newest`).

    The directory of a checkpoint is made for the time of the block.

    Raises: DataError: the run has no checkpoint, or a damaged one.
    """
    path = newest(path)
    if not (path / CHECKPOINT).is_file():
        yield path
        return
    with TemporaryDirectory(prefix="millrace-") as scratch:
        _write(RunDirectory(path.resolve().parents[1]), path, Path(scratch) / "model")
        yield Path(scratch) / "model"


@contextmanager
def served_config(config: Config, model: Path | None = None) -> Iterator[tuple[Config, Path]]:
    """`config` with a model directory as `model.path`, for the time of the block; and what that is made of.

    `model`: a model, a checkpoint or a run. None: `model.path`, which may be any of them too. Of a run the
    `newest` is chosen once, because a live run soon has a newer one.

    Raises: DataError: the run has no checkpoint, or a damaged one.
    """
    chosen = newest(model or Path(config.model.path))
    with model_directory(chosen) as directory:
        served = config.model.model_copy(update={"path": str(directory.resolve())})
        yield config.model_copy(update={"model": served}), chosen


def _write(
    run: RunDirectory, checkpoint: Path, out: Path, *, adapter: bool = False, master: bool = False
) -> None:
    config = run.read_config()
    exact = master and config.adapter.rank is None
    if adapter and config.adapter.rank is None:
        raise DataError(f"{run.path} trains all weights (`adapter.rank` is none): it has no adapter to write")
    if not (Path(config.model.path) / "config.json").is_file():
        raise DataError(
            f"the model that {run.path} began with is not at `model.path` ({config.model.path}) any more.\n"
            "  Put it back: a checkpoint has the weights alone, and no config.json and tokenizer"
        )
    if read_manifest(checkpoint).format == JAX:
        if not has_jax():
            words = "--version", int(checkpoint.name[1:]), "--out", out
            options = *["--adapter"] * adapter, *["--master"] * exact
            run_with_jax(config.trainer.python, "export", run.path, *words, *options)
            return
        write = wing("jax.export_adapter" if adapter else "jax.export_checkpoint")
    else:
        from millrace.trainer.files.export import export_adapter, export_checkpoint

        write = export_adapter if adapter else export_checkpoint
    model = config.model
    dtype = "float32" if exact else model.dtype
    write(checkpoint, out, model_path=model.path, dtype=dtype, adapter=config.adapter)
    model_version.write(out, int(checkpoint.name[1:]))


def is_finished(run: RunDirectory, steps: int) -> bool:
    """Every step committed, and the model of the last one exported with its tokenizer."""
    exported = model_version.read(run.model)
    if not (
        any((run.model / name).exists() for name in FILES) and run.summary.exists() and run.ledger.exists()
    ):
        return False
    with LedgerReader(run.ledger) as reader:
        return exported == reader.overview().version >= steps


# ---------------------------------------------------------------- checkpoints of JAX


def has_jax() -> bool:
    return find_spec("jax") is not None and find_spec("orbax") is not None


def run_with_jax(python: str | None, *arguments: object) -> str:
    """Run a command of Millrace in `python`, the run's `trainer.python`. Returns what it prints.

    Raises: ConfigError: there is no such Python; DataError: the command has failed.
    """
    words = [str(argument) for argument in arguments]
    if python is None:
        raise ConfigError(
            f"`millrace {words[0]}` needs JAX and Orbax, which {sys.executable} does not have.\n"
            "  Use a Python that has them (`make setup-jax`): .venv-jax/bin/python -m millrace ..."
        )
    path = os.pathsep.join([str(Path(millrace.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [python, "-m", "millrace", *words]
    try:
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ConfigError(f"`trainer.python` ({python}) cannot be started: {error.strerror}") from error
    if done.returncode:
        raise DataError(f"`trainer.python` ({python}): {done.stderr.strip()}")
    return done.stdout
