"""The trials of a sweep: what each changes, and how it ended. Plain data, kept in `sweep.json`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from millrace.core import files
from millrace.core.errors import ConfigError, DataError, boundary, writing
from millrace_sweeps.decisions.space import Overrides, trial_name

FILE, LOCK = "sweep.json", "sweep.lock"


class TrialState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """It has begun and goes on when the sweep does."""
    FINISHED = "finished"
    STOPPED = "stopped"
    """By the rule for early stops."""
    FAILED = "failed"


ENDED = (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED)


class SweepTrial(msgspec.Struct):
    """`step`: the last version that was seen. `looked`: the last on whose value a rule for stops decided."""

    overrides: dict[str, Any]
    state: TrialState = TrialState.WAITING
    value: float | None = None
    step: int = 0
    looked: int = 0
    reason: str = ""


class Trials(msgspec.Struct):
    """All trials by name, in the order in which they start."""

    metric: str
    goal: str
    swept_seeds: bool
    trials: dict[str, SweepTrial] = {}

    def add(self, combinations: Sequence[Overrides]) -> list[str]:
        """The names of those that are new. A trial that is there stays as it is."""
        names = {trial_name(overrides): overrides for overrides in combinations}
        new = [name for name in names if name not in self.trials]
        self.trials.update({name: SweepTrial(names[name]) for name in new})
        return new

    def drop_waiting(self, combinations: Sequence[Overrides]) -> None:
        """Trials that have not begun and are not among `combinations`: the lists have changed."""
        kept = {trial_name(overrides) for overrides in combinations}
        for name in set(self.of(TrialState.WAITING)) - kept:
            del self.trials[name]

    def recover(self, *, retry: bool) -> None:
        """The process that wrote this is gone: what ran was interrupted. `retry`: what failed goes on."""
        again = (TrialState.RUNNING, *([TrialState.FAILED] if retry else []))
        for trial in self.trials.values():
            if trial.state in again:
                trial.state, trial.reason = TrialState.INTERRUPTED, ""

    def forget_values(self) -> None:
        """They are of another metric."""
        for trial in self.trials.values():
            trial.value = None

    def due(self) -> list[str]:
        """Trials that may start now: interrupted ones first, then in order."""
        order = (TrialState.INTERRUPTED, TrialState.WAITING)
        return [name for state in order for name, trial in self.trials.items() if trial.state is state]

    def of(self, *states: TrialState) -> list[str]:
        return [name for name, trial in self.trials.items() if trial.state in states]


def read(directory: Path) -> Trials | None:
    """None: no sweep was there. Raises: DataError: the file is damaged."""
    path = directory / FILE
    if not path.exists():
        return None
    with boundary(str(path), "is no record of a sweep", DataError):
        return msgspec.json.decode(files.read(path), type=Trials)


def write(directory: Path, trials: Trials) -> None:
    """Atomically. Raises: StorageError."""
    path = directory / FILE
    partial = path.with_name(f"{FILE}.partial")
    with writing(path):
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(trials)))
        os.replace(partial, path)


@contextmanager
def owning(directory: Path) -> Iterator[None]:
    """The directory of a sweep, for one process at a time. The kernel lets go when the process ends.

    Raises: ConfigError: another process has it, or it holds something else. StorageError: it cannot be made.
    """
    if directory.exists() and not (directory / LOCK).exists() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory} holds files and no sweep.\n"
            "  Name another directory with --dir (in Python: `directory`)"
        )
    with writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process works on the sweep in {directory}.\n"
                "  Wait for its end, or stop it with Ctrl-C"
            ) from None
        yield
    finally:
        os.close(lock)
