"""The lineage of a run: the run from whose weights it began, and what it keeps of that.

    RUN/parent.json      the parent
    RUN/carried/start/   the start as a Hugging Face directory, which is the run's `model.path`
    RUN/carried/moments/ the optimizer's state in the parent's checkpoint, if it was taken too

So the run needs nothing of its parent once it has begun, and its directory may be moved.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.config import carried
from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import ConfigError, DataError
from millrace.run_directory.run_directory import RunDirectory

START = f"{carried.DIRECTORY}/start"
MOMENTS = f"{carried.DIRECTORY}/moments"
NO_JAX = "the optimizer's moments of another run are taken by the trainer in torch alone"


class Parent(msgspec.Struct, frozen=True):
    """The run, and its version, from whose weights another run began. `path`: where it was then. `moments`:
    the optimizer's state was taken too. `parent`: of the parent."""

    run: str
    name: str
    path: str
    version: int
    moments: bool
    parent: Parent | None = None

    def __str__(self) -> str:
        moments = ", with the optimizer's moments" if self.moments else ""
        before = f"; that from {self.parent}" if self.parent else ""
        return f"version {self.version} of {self.name}{moments}{before}"


def read_parent(run: RunDirectory) -> Parent | None:
    """None: the run began from a model that is no run's. Raises: DataError: the file is damaged."""
    try:
        data = files.read(run.parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return msgspec.json.decode(data, type=Parent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{run.parent} is damaged: {error}") from None


def kept_start(run: RunDirectory) -> Path | None:
    """The start that the run keeps. None: `model.path` is elsewhere."""
    path = run.path / START
    return path if path.is_dir() else None


def moments_of(run: RunDirectory, config: Config) -> Path | None:
    """The optimizer's state with which the run begins. None: it begins without.

    Raises: ConfigError: the run has no checkpoint yet, and its trainer can take no moments.
    """
    parent = read_parent(run)
    if parent is None or not parent.moments:
        return None
    if config.trainer.backend == "torch":
        return run.path / MOMENTS / f"v{parent.version:08d}"
    if not run.versions():
        raise ConfigError(f"{NO_JAX}.\n  Go on in torch until the first checkpoint")
    return None
