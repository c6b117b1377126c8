"""`millrace train`: checks, opens the run directory and trains; or explains and exits (`--dry-run`)."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millrace.checks import derived
from millrace.checks.first_try import FirstTry, try_first, warnings
from millrace.checks.preflight import preflight
from millrace.cli.options import Overrides, answers
from millrace.config.freeze import dump
from millrace.config.inert import inert
from millrace.config.load import Source, combine, load, read_overrides
from millrace.config.schema import Config
from millrace.core.events import Event
from millrace.observe.live.live_view import StructuredLog
from millrace.observe.terminal import Terminal, typed
from millrace.run import compose
from millrace.run.going_on import Start, begun_as, find_start, start_in
from millrace.run.interrupt import INTERRUPTED, run_stoppable
from millrace.run.resume import check_resume
from millrace.run_directory import run_directory
from millrace.run_directory.models import is_finished
from millrace.run_directory.run_directory import RunDirectory, kept_start


class LogForm(StrEnum):
    TEXT = "text"
    JSON = "json"


console = Terminal(stderr=True, soft_wrap=True, lasting=True)


def command(
    config_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="A TOML file; none to go on as a run was, with --resume or --from."
        ),
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept. Default: runs/NAME-DATE-N.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir, or the newest of CONFIG.")
    ] = False,
    from_version: Annotated[
        int | None,
        typer.Option(min=0, help="With --resume: undo the steps after this version, and go on from it."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@VERSION]",
            help="A new run, which begins with the weights of RUN. Without CONFIG it is configured as RUN.",
        ),
    ] = None,
    moments: Annotated[
        bool, typer.Option("--moments", help="With --from: begin with the optimizer's moments of RUN too.")
    ] = False,
    log: Annotated[
        LogForm, typer.Option(help="`json`: what happens as lines of JSON on stdout, and no live view.")
    ] = LogForm.TEXT,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print what would run, check it, and exit.")] = False,
) -> None:
    """Train a model with reinforcement learning. Ctrl-C finishes the step and saves; twice stops at once."""
    if from_version is not None and not resume:
        raise typer.BadParameter("--from-version goes with --resume")
    start = _start(begin, moments, resume)
    config = _config(config_file, overrides or [], run_dir, resume, start)
    start = start or (None if resume else start_in(config))
    if start is not None:
        config = start.fitted(config)
        console.print(f"Begins with {start}", markup=False)
    name = config_file.stem if config_file else start.name if start else ""
    if dry:
        if resume:
            _open(config, name, run_dir, resume)  # prints what changed, or refuses
        derived.show(config)
    first = _check(config, run_dir)
    if dry:
        derived.show_first_try(first)
        return
    run = _open(config, name, run_dir, resume)
    console.print(f"Run directory: {run.path}")
    if start is not None:
        start.write(run)
        config = start.own(config, run)
        run.write_config(config)
    if resume and from_version is None and is_finished(run, config.steps):
        console.print(f"All {config.steps} steps are done. To go on, raise `steps`: --set steps=N")
        return
    kept = [] if start else overrides or []  # the run has kept what it began with
    again = shlex.join(_resume_arguments(None if start else config_file, kept, run.path))
    if not _train(config, run, again, from_version, log):
        console.print(f"Stopped; nothing is lost. To go on: {again}")
        raise typer.Exit(INTERRUPTED)
    console.print(
        f"Done. The model: {run.model}\nLook around: {typed()} show {shlex.quote(str(run.path))}",
        markup=False,
    )


def _check(config: Config, run_dir: Path | None) -> FirstTry:
    """Print warnings, or raise the error with which the run would end."""
    try:
        doubts = preflight(config, run_dir or run_directory.RUNS)
        first = try_first(config)
    except KeyboardInterrupt:
        console.print("\nInterrupted by the user; nothing was started.")
        raise typer.Exit(INTERRUPTED) from None
    for warning in (*doubts, *warnings(config, first)):
        console.print(f"Warning: {warning}.", style="yellow")
    for line in inert(config):
        console.print(f"Note: {line}.")
    return first


def _start(begin: str | None, moments: bool, resume: bool) -> Start | None:
    if moments and begin is None:
        raise typer.BadParameter("--moments goes with --from")
    if resume and begin is not None:
        raise typer.BadParameter("--from begins a new run, and --resume goes on with one: leave one out")
    return None if begin is None else find_start(begin, moments=moments)


def _config(
    file: Path | None, overrides: list[str], run_dir: Path | None, resume: bool, start: Start | None
) -> Config:
    """The configuration of the file, of the run to resume, or of the run to begin from."""
    if start is not None:
        if any(one.partition("=")[0].strip() == "model.path" for one in overrides):
            raise typer.BadParameter("--from names the weights, and `--set model.path` others: leave one out")
        overrides = [*overrides, f"model.path={start.model}"]
    elif file is not None and resume:
        run = run_directory.reopen(file.stem, run_dir)
        model = kept_start(run)
        overrides = [f"model.path={model}", *overrides] if model else overrides
        return begun_as(load(file, overrides), run)  # `overrides` may name what the run began from
    if file is not None:
        return load(file, overrides)
    if start is None and (not resume or run_dir is None):
        raise typer.BadParameter(
            "name a configuration, a run to go on with: --run-dir RUN --resume, or a run to begin from: "
            "--from RUN"
        )
    run = start.run if start else run_directory.reopen("", run_dir)
    kept = Source(dump(run.read_config()), {})
    config = combine(Config, kept, read_overrides(Config, overrides, Path.cwd()))
    return config if start else begun_as(config, run)


def _open(config: Config, name: str, run_dir: Path | None, resume: bool) -> RunDirectory:
    if not resume:
        return run_directory.create(name, run_dir)
    run = run_directory.reopen(name, run_dir)
    for change in check_resume(run.read_config(), config):
        console.print(f"Changed: `{change.key}`: {change.old!r} -> {change.new!r} ({change.allowed})")
    return run


def _train(config: Config, run: RunDirectory, again: str, from_version: int | None, log: LogForm) -> bool:
    as_json = log is LogForm.JSON
    # The live view's terminal, so that messages are printed above the view. With JSON it prints nothing.
    view = Terminal(quiet=True, force_terminal=False) if as_json else Terminal(lasting=True)
    sinks = [StructuredLog(answers())] if as_json else []

    def at_once() -> None:
        view.show_cursor()  # which the live view hides
        console.print(f"\nStopped at once; what the ledger holds is kept. To go on: {again}")

    steps: list[Event] = []

    def first_step(event: Event) -> None:
        if event.kind == "step" and not steps:
            steps.append(event)

    def training(stop: asyncio.Event) -> Coroutine[None, None, None]:
        return compose.train(config, run, stop, first_step, *sinks, console=view, from_version=from_version)

    print_line = console.print if as_json else view.print
    return run_stoppable(
        training,
        print_line,
        at_once=at_once,
        has_work=lambda: bool(steps),
        grace_s=config.supervision.stop_grace_s,
    )


def _resume_arguments(config_file: Path | None, overrides: list[str], run_path: Path) -> list[str]:
    sets = [word for override in overrides for word in ("--set", override)]
    return [
        *shlex.split(typed()),
        "train",
        *([str(config_file)] if config_file else []),
        *sets,
        "--run-dir",
        str(run_path),
        "--resume",
    ]
