"""A sweep from its file to its end: own the directory, check every trial, run what is left, compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.api.configure import Components
from millrace.api.sweep import SweepLike
from millrace.config.schema import Config
from millrace.core.errors import DataError
from millrace.run.compose import place
from millrace.run_directory import run_directory
from millrace_sweeps import trial_record as record
from millrace_sweeps.board import Board, counts, ranking
from millrace_sweeps.checking import check_trials, refuse_changed_base
from millrace_sweeps.decisions.capacity import Slot, at_once, slots
from millrace_sweeps.decisions.standings import standings
from millrace_sweeps.driver import Driver
from millrace_sweeps.loading import LoadedSweep, load_sweep
from millrace_sweeps.proposals import Proposals, proposals
from millrace_sweeps.trial_record import Trials, TrialState


def directory_of(sweep: LoadedSweep, explicit: Path | None) -> Path:
    """The same at each start of a sweep, so that it goes on."""
    return (explicit or run_directory.RUNS / sweep.name).absolute()


def checked(sweep: LoadedSweep, directory: Path, console: Console) -> tuple[Proposals, list[Slot]]:
    """Where the trials come from, and the slots that they have here. Nothing is started.

    Raises: ConfigError, DataError, RewardError: a trial is not possible; see `check_trials`.
    """
    source = proposals(sweep.config)

    def warn(text: str) -> None:
        console.print(f"Warning: {text}.", style="yellow")

    refuse_changed_base(sweep, directory)
    first = check_trials(sweep, source.examples(), directory, warn)
    return source, slots_of(sweep, first)


def slots_of(sweep: LoadedSweep, config: Config) -> list[Slot]:
    layout = place(config)
    return slots(at_once(sweep.config.at_once, config, layout), config, layout)


def run_sweep(sweep: LoadedSweep, directory: Path, *, retry: bool, console: Console) -> Trials:
    """Run the trials that are left, to the end. Started again, it goes on.

    Raises:
        ConfigError, DataError, RewardError: a trial is not possible; nothing was started.
        KeyboardInterrupt: the trials have finished their steps and saved.
    """
    config = sweep.config
    with record.owning(directory):
        source, places = checked(sweep, directory, console)
        trials = record.read(directory) or Trials(config.metric, config.goal, bool(config.seeds))
        if trials.metric != config.metric:
            trials.forget_values()
        trials.metric, trials.goal, trials.swept_seeds = config.metric, config.goal, bool(config.seeds)
        trials.recover(retry=retry)
        if config.optuna is None:
            trials.drop_waiting(source.first())
        trials.add(source.first())
        record.write(directory, trials)
        console.print(f"Sweep: {directory}: {counts(trials)}; {len(places)} at once", soft_wrap=True)
        steps: dict[str, int] = {}
        with Board(console, trials, steps) as board:
            Driver(sweep, directory, trials, source, places, board, steps).run()
        left = len(trials.of(TrialState.INTERRUPTED))
        if left:
            console.print(f"{left} interrupted: start the sweep again to go on with them")
        return trials


# ---------------------------------------------------------------- of Python


def sweep(
    config: SweepLike,
    components: Components,
    keywords: Mapping[str, Any],
    directory: Path | None,
    *,
    retry: bool,
    console: Console,
) -> Path:
    """Run what is left of a sweep, and print the ranking. Returns its directory. Raises: as `run_sweep`."""
    loaded = load_sweep(config, components=components, keywords=keywords)
    path = directory_of(loaded, directory)
    console.print(ranking(run_sweep(loaded, path, retry=retry, console=console)))
    return path


def counts_of(directory: Path) -> str:
    """As `counts`. Raises: DataError: there is no sweep."""
    return counts(_trials(directory))


def trials_of(directory: Path) -> list[dict[str, Any]]:
    """A record for each trial. Raises: DataError: there is no sweep."""
    return [
        {
            "name": name,
            "state": str(trial.state),
            "step": trial.step,
            "value": trial.value,
            "reason": trial.reason,
            "overrides": dict(trial.overrides),
        }
        for name, trial in _trials(directory).trials.items()
    ]


def ranking_of(directory: Path) -> list[dict[str, Any]]:
    """A record for each combination of keys, the best first. Raises: DataError: there is no sweep."""
    return [
        {
            "overrides": dict(one.overrides),
            "value": one.value,
            "standard_error": None if math.isnan(one.error) else one.error,
            "trials": list(one.names),
            "finished": one.num_finished,
            "stopped": one.num_stopped,
            "failed": one.num_failed,
            "unvalued": one.num_unvalued,
        }
        for one in standings(_trials(directory))
    ]


def _trials(directory: Path) -> Trials:
    trials = record.read(directory)
    if trials is None:
        raise DataError(f"{directory} is no sweep: it has no {record.FILE}")
    return trials
