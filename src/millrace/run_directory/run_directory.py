"""The directory of one run: its name, its files and its lineage, that is the run from whose weights it
began, and what it keeps of that. The ledger's lock says who owns the directory.

    RUN/parent.json      the parent
    RUN/carried/start/   the start as a Hugging Face directory, which is the run's `model.path`
    RUN/carried/moments/ the optimizer's state in the parent's checkpoint, if it was taken too

So the run needs nothing of its parent once it has begun, and its directory may be moved.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from millrace.config import carried
from millrace.config.freeze import record, restore
from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import ConfigError, DataError, LedgerError, boundary, writing
from millrace.ledger.reading import LedgerReader

RUNS = Path("runs")
CONFIG_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class RunDirectory:
    """Where every file of a run is. `path` is absolute. The whole directory may be moved."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def carried(self) -> Path:
        """Functions and rows of the script that began the run: see `config.carried`."""
        return self.path / carried.DIRECTORY

    @property
    def parent(self) -> Path:
        """The run that this run began from: see `run_directory.run_directory`."""
        return self.path / "parent.json"

    @property
    def weights(self) -> Path:
        """The newest versions, for `rollout.servers`."""
        return self.path / "weights"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def scale(self) -> Path:
        """How many replicas the run wants: see `run.scaling`."""
        return self.path / "scale.json"

    @property
    def scale_ask(self) -> Path:
        """The request of `millrace scale`."""
        return self.path / "scale.ask.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One line for each evaluation of the run's models."""
        return self.path / "evaluations.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The output of workers, NAME.EPOCH.log, and the controller's stacks when it stalled."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The exported model: a Hugging Face directory."""
        return self.path / "model"

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints / f"v{version:08d}"

    def exported(self, version: int) -> Path:
        """Where `millrace export` writes the model of a version by default."""
        return self.path / "exports" / f"v{version:08d}"

    def versions(self) -> list[int]:
        """The versions of its checkpoints, complete or not, the oldest first."""
        names = (path.name[1:] for path in self.checkpoints.glob("v????????"))
        return sorted(int(name) for name in names if name.isdigit())

    def is_owned(self) -> bool:
        """Whether a living process owns the run. Takes a shared lock and releases it at once.

        Raises: DataError: the lock is no regular file.
        """
        lock = Path(f"{self.ledger}.lock")
        try:
            with files.opened(lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        return False

    def write_config(self, config: Config) -> None:
        """Atomically. Writes the configuration only: credentials are in the environment, and are never
        written. The date that the run began with stays, if `config` has none."""
        if config.model.date is None and self.config.exists():
            date = self.read_config().model.date
            config = config.model_copy(update={"model": config.model.model_copy(update={"date": date})})
        record(config, self.config)

    def forget_evaluations(self, *, after: int) -> None:
        """Delete the lines of undone versions: new versions will have their numbers. Atomically. Raises:
        DataError."""
        if not self.evaluations.exists():
            return
        with boundary(str(self.evaluations), "a line is damaged", DataError):
            lines = files.read(self.evaluations).splitlines(keepends=True)  # of bytes, so not at U+2028
            kept = b"".join(line for line in lines if json.loads(line)["version"] <= after)
        _replace(self.evaluations, kept.decode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Atomically."""
        _replace(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_config(self) -> Config:
        try:
            tree = files.read_json(self.config, CONFIG_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{self.path} is no run directory: it has no config.json") from None
        if not isinstance(tree, dict):
            raise DataError(f"{self.config} is a JSON {type(tree).__name__}, expected an object with keys")
        if "model_type" in tree:
            raise DataError(f"{self.path} is a model, and no run: give the directory of a run")
        return restore(tree, self.config)


def _replace(path: Path, text: str) -> None:
    """Atomically. Raises: StorageError."""
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def create(name: str, explicit: Path | None, *, runs: Path = RUNS) -> RunDirectory:
    """A new run directory, readable by its owner only: `explicit`, or `runs/<name>-<date>-<n>`.

    A run in `explicit` that ended before it admitted a group is removed: the user corrected a mistake in the
    configuration and tries again. So is what a run left that was killed while it began.

    Raises: ConfigError: `explicit` exists and is not empty. StorageError: it cannot be made.
    """
    if explicit is not None:
        _remove_barren(RunDirectory(explicit))
        _refuse_used(explicit)
        with writing(explicit):
            explicit.mkdir(mode=0o700, parents=True, exist_ok=True)
            explicit.chmod(0o700)
        return RunDirectory(explicit.resolve())
    with writing(runs):
        return _numbered(name, runs)


def _numbered(name: str, runs: Path) -> RunDirectory:
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%d')}"
    number = 1
    while True:
        path = runs / f"{stem}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return RunDirectory(path.resolve())
        number += 1


def _remove_barren(run: RunDirectory) -> None:
    """Remove a run without a single group, unless the directory holds a file that is not the run's. Without a
    configuration it was killed while it began: it has something carried, or a ledger."""
    ours = {run.carried, run.parent, run.logs}
    begun = run.config.is_file()
    if begun:
        ours |= {run.config, run.events, run.metrics, run.summary, run.path / "tensorboard"}
        ours |= {run.scale, run.scale_ask, run.path / "wandb"}
    begun = begun or run.carried.is_dir() or run.ledger.is_file()
    if any(path.is_symlink() for path in run.path.glob("*")):
        return
    if not begun or run.is_owned() or not _is_barren(run.ledger):
        return
    files_of_run = list(run.path.iterdir())
    if all(path in ours or path.name.startswith(run.ledger.name) for path in files_of_run):
        for path in files_of_run:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_barren(ledger: Path) -> bool:
    if not ledger.exists():
        return True
    try:
        with LedgerReader(ledger) as reader:
            return reader.overview().num_groups == 0
    except LedgerError:
        return False


def _refuse_used(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"the run directory {path} is a file")
    if any(path.iterdir()):
        raise ConfigError(
            f"the run directory {path} is not empty.\n"
            "  Add --resume to go on with the run in it, or name another --run-dir.\n"
            "  In Python: `millrace.Run(PATH).resume()`, or another `run_dir`"
        )


def reopen(name: str, explicit: Path | None, *, runs: Path = RUNS) -> RunDirectory:
    """The run to resume: `explicit`, or the newest of `name` under `runs`.

    Raises: ConfigError: there is none, or a link in it leads out of it, or a file that it writes has a second
    name.
    """
    run = _reopened(name, explicit, runs)
    leading_out = next(_links_out(run.path), None)
    if leading_out is not None:
        raise ConfigError(
            f"{leading_out} is a symbolic link to {os.readlink(leading_out)}, outside of the run directory.\n"
            "  A run writes and deletes in its own directory only: put what it links to in its place, or "
            "name another --run-dir"
        )
    _refuse_shared(run)
    return run


def _links_out(path: Path) -> Iterator[Path]:
    """Symbolic links in the directory that lead out of it. Each session of W&B has a folder in `wandb/`, with
    such a link to a log; nothing is written into the folders of earlier sessions."""
    for directory, folders, names in os.walk(path):
        for entry in (Path(directory, name) for name in (*folders, *names)):
            if entry.is_symlink() and not entry.resolve().is_relative_to(path):
                yield entry
        if Path(directory) == path / "wandb":
            folders.clear()


def _refuse_shared(run: RunDirectory) -> None:
    """A copy made of hard links (`cp -al`) would write into the original run. Files that are only replaced,
    like those of a checkpoint, may be shared."""
    written = [*run.path.glob(f"{run.ledger.name}*"), run.events, run.metrics, *run.logs.glob("*")]
    for path in written:
        if path.is_file() and path.stat().st_nlink > 1:
            raise ConfigError(
                f"{path} has {path.stat().st_nlink} names (hard links): the run would write into the file "
                "that the others name.\n  Copy the run directory with `cp -r`, which makes new files, and "
                "name the copy with --run-dir"
            )


def _reopened(name: str, explicit: Path | None, runs: Path) -> RunDirectory:
    if explicit is not None:
        if not (explicit / "config.json").is_file():
            raise ConfigError(
                f"{explicit} holds no run to resume: it has no config.json.\n"
                "  Correct the path, or leave --resume out to start a new run"
            )
        return RunDirectory(explicit.resolve())
    paths = [path.parent for path in runs.glob(f"{name}-*/config.json")]
    if not paths:
        raise ConfigError(
            f"there is no run of {name!r} under {runs}/ to resume.\n"
            "  Name one with --run-dir, or leave --resume out to start a new one"
        )
    return _newest(paths)


def find(path: Path) -> RunDirectory:
    """The run in `path`; where `path` holds runs, like `runs/`, the newest of them.

    Raises: DataError: there is none.
    """
    if (path / "config.json").exists():
        return RunDirectory(path.resolve())
    paths = [config.parent for config in path.glob("*/config.json")]
    if not paths:
        raise DataError(f"{path} is no run directory and holds none: there is no config.json")
    return _newest(paths)


def _newest(paths: list[Path]) -> RunDirectory:
    """The run that was last started or resumed."""
    newest = max(paths, key=lambda path: (path / "config.json").stat().st_mtime)
    return RunDirectory(newest.resolve())


# ---------------------------------------------------------------- lineage


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
