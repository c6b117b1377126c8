"""`millrace sweep`: many runs of one configuration, and a table that compares them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from millrace.observe.terminal import Terminal, typed
from millrace.run.interrupt import INTERRUPTED
from millrace.runtime.process import interrupt_on_signals
from millrace_sweeps.board import ranking
from millrace_sweeps.decisions.space import trial_name
from millrace_sweeps.decisions.standings import standings
from millrace_sweeps.loading import LoadedSweep, load_sweep
from millrace_sweeps.run_sweep import checked, directory_of, run_sweep
from millrace_sweeps.trial_record import Trials, TrialState


def command(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="A TOML file.", show_default=False)],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where its runs are kept. Default: runs/NAME.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the base. Repeatable."),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Go on with failed trials too.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Check and list the trials, and exit.")] = False,
) -> None:
    """Train with other keys and seeds, and compare. Started again, it goes on. Ctrl-C finishes the steps and
    saves; twice stops at once."""
    interrupt_on_signals()
    sweep = load_sweep(file, overrides=overrides or [])
    path, terminal = directory_of(sweep, directory), Terminal(lasting=True)
    try:
        if dry:
            _show(sweep, path, terminal)
            return
        trials = run_sweep(sweep, path, retry=retry, console=terminal)
    except KeyboardInterrupt:
        terminal.print(f"Stopped; nothing is lost. To go on: {_again(file, directory, overrides or [])}")
        raise typer.Exit(INTERRUPTED) from None
    terminal.print(ranking(trials))
    _hint(trials, path, terminal)
    if trials.of(TrialState.FAILED):
        terminal.print("Failed trials go on with --retry")
        raise typer.Exit(1)


def _show(sweep: LoadedSweep, path: Path, terminal: Terminal) -> None:
    source, places = checked(sweep, path, terminal)
    for overrides in source.first():
        terminal.print(trial_name(overrides), soft_wrap=True)
    if not source.first():
        terminal.print("Optuna proposes the trials while the sweep runs")
    num = len(source.first())
    terminal.print(
        f"{path}: {num} trials, {len(places)} at once" if num else f"{path}: {len(places)} at once"
    )


def _hint(trials: Trials, path: Path, terminal: Terminal) -> None:
    best = [one.names[0] for one in standings(trials) if one.value is not None][:2]
    if len(best) > 1:
        runs = shlex.join(str(path / name) for name in best)
        terminal.print(f"Compare a run of each of the best two: {typed()} compare {runs}", soft_wrap=True)
    terminal.print(f"All runs in a browser: {typed()} ui {shlex.quote(str(path))}", soft_wrap=True)


def _again(file: Path, directory: Path | None, overrides: list[str]) -> str:
    sets = [word for override in overrides for word in ("--set", override)]
    where = ["--dir", str(directory)] if directory is not None else []
    return f"{typed()} sweep {shlex.join([str(file), *where, *sets])}"
