"""`millrace.sweep`: many runs from a script, and their comparison as plain records."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.api.configure import Components
from millrace.api.helper_process import info
from millrace.api.plain_records import Records
from millrace.api.run import Run
from millrace.core.wings import wing
from millrace.observe.terminal import Terminal

SweepLike = str | os.PathLike[str] | Mapping[str, Any]


class Sweep:
    """The directory of a sweep: its trials and their comparison, while it runs and after.

    Args:
        path: the directory, with a run directory for each trial.
    Raises:
        DataError: there is no sweep.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._counts()

    def __repr__(self) -> str:
        return f"<millrace.Sweep {self._path}: {self._counts()}>"

    @property
    def path(self) -> Path:
        """The directory of its runs."""
        return self._path

    def trials(self) -> Records:
        """One record per trial: `name`, `state`, `step`, `value`, `reason`, and the keys that it changes in
        `overrides`."""
        return Records(wing("sweeps.trials")(self._path))

    def ranking(self) -> Records:
        """One record per combination of keys, the best first. `value` is the mean over seeds, each with what
        it had at its end, and `standard_error` is None for one value alone. `trials` has names. `finished`,
        `stopped` and `failed` count them, and `unvalued` those that ended without a value."""
        return Records(wing("sweeps.ranking")(self._path))

    def run(self, name: str) -> Run:
        """The run of a trial. Raises: DataError: it has not begun, or there is no such trial."""
        return Run(self._path / name)

    def _counts(self) -> str:
        return str(wing("sweeps.counts")(self._path))


def sweep(
    config: SweepLike,
    *,
    reward: Callable[..., Any] | str | Mapping[str, Any] | None = None,
    rows: Sequence[Mapping[str, Any]] | Any = None,
    algorithm: Any = None,
    schedule: Any = None,
    directory: str | os.PathLike[str] | None = None,
    retry: bool = False,
    show: bool = True,
    **keywords: Any,
) -> Sweep:
    """Train with other keys and seeds, and compare (docs/sweeps.md). Called again, it goes on.

    Args:
        config: a sweep's TOML file, or a dict with the same tables and keys.
        reward, rows, algorithm, schedule: as of `train`, for every trial.
        directory: where the runs are kept. Default: `runs/NAME`, with the name of the file, or `runs/sweep`.
        retry: go on with failed trials too.
        show: print the progress and the comparison.
        keywords: configuration keys over those of `base`, as of `train`.
    Raises:
        ConfigError, DataError, RewardError: a trial is not possible; nothing was started.
        KeyboardInterrupt: the user interrupted; the trials have finished their steps and saved.
    """
    components = Components(reward, rows, algorithm, schedule)
    where = Path(directory) if directory is not None else None
    console = Terminal(stderr=True, quiet=not show)
    run = wing("sweeps.sweep")
    try:
        path = run(config, components, keywords, where, retry=retry, console=console)
    except KeyboardInterrupt:
        info("Stopped; nothing is lost. To go on, call `millrace.sweep` again.")
        raise
    return Sweep(path)
