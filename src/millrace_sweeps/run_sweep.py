"""A sweep from its file to its end: own the directory, check every trial, run what is left."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from millrace.compose.compose import place
from millrace.config.schema import Config
from millrace.run_directory import run_directory
from millrace_sweeps import trial_record as record
from millrace_sweeps.board import Board, counts
from millrace_sweeps.checking import check_trials, refuse_changed_base
from millrace_sweeps.decisions.capacity import Slot, at_once, slots
from millrace_sweeps.driver import Driver
from millrace_sweeps.loading import LoadedSweep
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
