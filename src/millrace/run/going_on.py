"""A new run that begins from another run's weights. `run_directory.run_directory` says what it keeps."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millrace.config import carried
from millrace.config.freeze import dump
from millrace.config.load import Source, combine, validate
from millrace.config.schema import Config
from millrace.core import model_version
from millrace.core.errors import ConfigError, DataError, writing
from millrace.ledger.lock import RunLock
from millrace.ledger.reading import LedgerReader
from millrace.run_directory import run_directory
from millrace.run_directory.models import CHECKPOINT, checkpoint_of, origin, write_master
from millrace.run_directory.run_directory import (
    MOMENTS,
    NO_JAX,
    START,
    Parent,
    RunDirectory,
    kept_start,
    read_parent,
)
from millrace.trainer.files.checkpoint_manifest import TORCH, read_manifest


@dataclass(frozen=True)
class Start:
    """What a new run begins from. `source`: a checkpoint of `run`, or the model of its end. `moments`: take
    the optimizer's state too."""

    run: RunDirectory
    source: Path
    version: int
    moments: bool = False

    def __str__(self) -> str:
        moments = ", with the optimizer's moments" if self.moments else ""
        return f"version {self.version} of {self.run.path}{moments}"

    @property
    def name(self) -> str:
        """Of the parent, without date and number."""
        return re.sub(r"-\d{8}-\d+$", "", self.run.path.name)

    @property
    def is_checkpoint(self) -> bool:
        return (self.source / CHECKPOINT).is_file()

    @property
    def model(self) -> Path:
        """A model with the configuration and the tokenizer of the start, for checks before the start is
        written."""
        return Path(self.run.read_config().model.path) if self.is_checkpoint else self.source

    def parent(self) -> Parent:
        with LedgerReader(self.run.ledger, check=False) as reader:
            identity = str(reader.overview().about.get("id", ""))
        path = self.run.path
        return Parent(identity, path.name, str(path), self.version, self.moments, read_parent(self.run))

    def fitted(self, config: Config) -> Config:
        """`config` for the checks before a run: with `model`.

        Raises: DataError: the parent's own start is gone. ConfigError naming each reason why the moments
        cannot be taken.
        """
        if not (self.model / "config.json").is_file():
            raise DataError(
                f"the start of {self.run.path} is gone: its `model.path` ({self.model}) has no config.json.\n"
                "  A checkpoint has weights alone: put the directory back"
            )
        if self.moments and (reasons := list(self._reasons(config))):
            raise ConfigError(
                f"the optimizer's moments of {self.run.path} cannot be taken:\n"
                + "\n".join(f"  {reason}" for reason in reasons)
                + "\n  Leave `moments` out, or correct these"
            )
        return with_model(config, self.model)

    def _reasons(self, config: Config) -> Iterator[str]:
        old = self.run.read_config()
        if not self.is_checkpoint:
            yield f"it keeps no checkpoint of version {self.version}, only the model of its end"
        elif read_manifest(self.source).format != TORCH or "jax" in (
            config.trainer.backend,
            old.trainer.backend,
        ):
            yield f"`trainer.backend`: {NO_JAX}, and from it"
        if old.adapter.rank is not None or config.adapter.rank is not None:
            yield (
                f"`adapter.rank` ({old.adapter.rank} there, {config.adapter.rank} here): the start has the "
                "adapter merged, and a new adapter begins at 0"
            )
        for key in ("rule", "states"):
            there, here = (getattr(one.optimizer, key) for one in (old, config))
            if there != here:
                yield f"`optimizer.{key}` is {there!r} there, and {here!r} here"

    # ------------------------------------------------------------ into the new run

    def write(self, run: RunDirectory) -> None:
        """Write the start and the lineage into a new run's directory. On an error the directory is removed.

        Raises: DataError: the checkpoint is damaged, or was deleted meanwhile. StorageError, LedgerError.
        """
        lock = RunLock(str(run.ledger))  # so nobody takes what is half written for the rest of a killed run
        try:
            with self._kept():
                run.carried.mkdir(mode=0o700, exist_ok=True)
                self._write(run)
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        finally:
            lock.release()

    def _write(self, run: RunDirectory) -> None:
        start = run.path / START
        if self.is_checkpoint:
            write_master(self.run, self.source, start)
        else:
            with writing(start):
                shutil.copytree(self.source, start)
        if self.moments:
            from millrace.trainer.files.moments import keep_moments

            keep_moments(self.source, run.path / MOMENTS)
        with writing(run.parent):
            model_version.write(start, 0)
            run.parent.write_bytes(msgspec.json.format(msgspec.json.encode(self.parent())))

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """A run that trains deletes old checkpoints."""
        try:
            yield
        except (DataError, OSError) as error:
            if self.source.is_dir():
                raise
            raise DataError(
                f"{self.source} was deleted meanwhile: the run trains on.\n  Try again"
            ) from error

    def own(self, config: Config, run: RunDirectory) -> Config:
        """`config` with the start in the new run's directory. Files that the parent carries, and that
        `config` names, are copied there.

        Raises: StorageError.
        """
        tree = carried.relative(dump(with_model(config, run.path / START)), self.run.path)
        for path in carried.named(tree):
            if not (run.path / path).exists():
                with writing(run.path / path):
                    shutil.copy2(self.run.path / path, run.path / path)
        return validate(Config, carried.absolute(tree, run.path), {})


def with_model(config: Config, path: Path) -> Config:
    return combine(Config, Source(dump(config), {}), Source({"model": {"path": str(path)}}, {}))


def find_start(name: str | os.PathLike[str], *, moments: bool = False) -> Start:
    """The start that `name` means: RUN, its newest version; RUN@VERSION; or a checkpoint's directory.

    A path that exists as it is written has no version in it, whatever its name.

    Raises: DataError: there is no such run, or it keeps no such version.
    """
    path, version = _divided(os.fspath(name))
    if version is None and (path / CHECKPOINT).is_file():
        of = origin(path)
        if of is None:
            raise DataError(f"{path} is a checkpoint of no run: name one in RUN/checkpoints")
        return Start(of[0], path.resolve(), of[1], moments)
    run = run_directory.find(path)
    if not run.ledger.is_file():
        raise DataError(
            f"{run.path} is no run: it has no ledger.\n  A model of another origin is named by `model.path`"
        )
    ended = model_version.read(run.model) if (run.model / "config.json").is_file() else -1
    kept = run.versions()
    wanted = max([*kept, ended]) if version is None else version
    if wanted == ended and wanted not in kept and ended >= 0:
        return Start(run, run.model, ended, moments)
    return Start(run, checkpoint_of(run, wanted), wanted, moments)


def _divided(name: str) -> tuple[Path, int | None]:
    before, at, version = name.rpartition("@")
    if at and version.isascii() and version.isdigit() and not os.path.lexists(name):
        return Path(before).expanduser(), int(version)
    return Path(name).expanduser(), None


def start_in(config: Config) -> Start | None:
    """The start that `model.path` names, if that is a run or a checkpoint of one."""
    path = Path(config.model.path)
    with suppress(OSError):
        if (path / CHECKPOINT).is_file() or RunDirectory(path).ledger.is_file():
            return find_start(path)
    return None


def checkable(config: Config) -> Config:
    """`config` with a model, for checks, where `model.path` names a run or a checkpoint."""
    start = start_in(config)
    return config if start is None else start.fitted(config)


def begun_as(config: Config, run: RunDirectory) -> Config:
    """`config` with the start that `run` keeps, where `model.path` names what it began from: a run or a
    checkpoint, which may be gone."""
    start, parent = kept_start(run), read_parent(run)
    if start is None or parent is None:
        return config
    path = Path(config.model.path).resolve()
    same = RunDirectory(Path(parent.path))
    return with_model(config, start) if path in (same.path, same.checkpoint(parent.version)) else config
