"""Trials before they start: all are looked at before the first, and each gets its directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.api.configure import PreparedConfig, check
from millrace.api.train import write_start
from millrace.checks.preflight import preflight
from millrace.config.carried import is_carried
from millrace.config.freeze import dump
from millrace.config.load import validate
from millrace.config.schema import Config
from millrace.core.errors import ConfigError, MillraceError
from millrace.run.going_on import Start, begun_as, checkable, find_start, start_in
from millrace.run.resume import diff
from millrace.run_directory.models import CHECKPOINT
from millrace.run_directory.run_directory import RunDirectory, read_parent
from millrace_sweeps import trial_record as record
from millrace_sweeps.decisions.space import Overrides, identity, trial_name
from millrace_sweeps.loading import LoadedSweep, check_metric, figure_by
from millrace_sweeps.trial_record import Trials


def check_trials(
    sweep: LoadedSweep, trials: list[Overrides], directory: Path, warn: Callable[[str], None]
) -> Config:
    """Load each configuration, and see whether this machine can run it. The first is also tried: its task
    and its reward. Returns the first configuration.

    Raises: ConfigError, DataError, RewardError: a trial could not begin; its name is a note of the error.
    """
    first: Config | None = None
    seen, warned = set[str](), set[str]()
    for overrides in trials:
        try:
            prepared = sweep.prepared(overrides)
            run = RunDirectory(directory / trial_name(overrides))
            refuse_changed(run, prepared.config, sweep.config.metric)
            prepared.config = checkable(begun_as(prepared.config, run))
            combination = identity({key: value for key, value in overrides.items() if key != "seed"})
            if first is None:
                check_metric(sweep, prepared.config)
                check(prepared, directory)
            elif combination not in seen:
                warned.update(preflight(prepared.config, directory))
            seen.add(combination)
            first = first or prepared.config
        except MillraceError as error:
            error.add_note(f"in the trial {trial_name(overrides)}")
            raise
    for warning in sorted(warned):
        warn(warning)
    assert first is not None, "a sweep has a trial"
    return first


def refuse_changed_base(sweep: LoadedSweep, directory: Path) -> None:
    """Every trial that has begun is compared, also those that the lists no longer have.

    Raises: ConfigError: see `refuse_changed`; the name of the trial is a note of the error.
    """
    trials = record.read(directory)
    for name, trial in trials.trials.items() if trials is not None else ():
        run = RunDirectory(directory / name)
        if not run.config.exists():
            continue
        try:
            refuse_changed(run, sweep.prepared(trial.overrides).config, sweep.config.metric)
        except MillraceError as error:
            error.add_note(f"in the trial {name}")
            raise


def refuse_changed(run: RunDirectory, config: Config, metric: str) -> None:
    """A trial that has begun goes on as it began. What a script passed is not compared: the run keeps it.

    Raises: ConfigError: a key was changed that decides what is learned, the number of steps, or the figure by
        which trials are compared.
    """
    if not run.config.exists():
        return
    old = run.read_config()
    was, by = figure_by(old, metric), figure_by(config, metric)
    if was and by and was != by:
        raise ConfigError(
            f"trials of the sweep in {run.path.parent} have begun with another figure to compare: `by` of "
            f"the evaluation in `metric` ({metric!r}) was {was!r} and is {by!r}.\n  Put it back, or name the "
            f"figure itself, such as {metric}/sampled: then every trial is measured again"
        )
    changes = [
        change
        for change in diff(old, begun_as(config, run))
        if (not change.allowed or change.key == "steps") and not is_carried(str(change.new))
    ]
    if changes:
        listed = "\n".join(f"  `{change.key}`: {change.old!r} -> {change.new!r}" for change in changes)
        raise ConfigError(
            f"the sweep in {run.path.parent} has begun, and these keys have changed since:\n{listed}\n"
            "  Put them back, or name another directory with --dir (in Python: `directory`)"
        )


def going_on(old: Config, new: Config) -> Config:
    """The configuration of a trial that has begun as `old`, when `refuse_changed` let `new` pass."""
    tree = _with_files_of(dump(old), dump(new))
    return validate(Config, {**tree, "steps": old.steps}, {})


def _with_files_of(old: Any, new: Any) -> Any:
    """`new`, with the carried files of `old`. A table in a list goes by its `name`."""
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: _with_files_of(old.get(key), value) for key, value in new.items()}
    if isinstance(new, list) and isinstance(old, list):
        named = {one.get("name"): one for one in old if isinstance(one, dict)}
        return [
            _with_files_of(named.get(one.get("name")), one) if isinstance(one, dict) else one for one in new
        ]
    return old if isinstance(new, str) and is_carried(new) else new


def begin_trial(prepared: PreparedConfig, run: RunDirectory, trials: Trials) -> Config:
    """Make the directory, with all that the trial needs but its configuration, which is returned.

    The wait for a start is as long as its weights take to write. On an error the directory is removed.
    """
    shutil.rmtree(run.carried, ignore_errors=True)  # of a sweep that was killed here
    run.parent.unlink(missing_ok=True)
    run.path.mkdir(mode=0o700, exist_ok=True)
    try:
        start = start_of(prepared.config, run, trials)
        prepared.place(run.path)
        return prepared.config if start is None else write_start(start, prepared.config, run)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def start_of(config: Config, run: RunDirectory, trials: Trials) -> Start | None:
    """The start that `model.path` names. A run may train on meanwhile: trials that name the same run begin
    with the version that the first of them began with.

    Raises: DataError: the run keeps no such version.
    """
    start = start_in(config)
    if start is None or (Path(config.model.path) / CHECKPOINT).is_file():
        return start
    named = _model_keys(trials, run.path.name)
    for name in trials.trials:
        parent = read_parent(RunDirectory(run.path.with_name(name)))
        if parent and parent.path == str(start.run.path) and _model_keys(trials, name) == named:
            return find_start(f"{start.run.path}@{parent.version}")
    return start


def _model_keys(trials: Trials, name: str) -> dict[str, Any]:
    overrides = trials.trials[name].overrides
    return {key: value for key, value in overrides.items() if key.partition(".")[0] == "model"}
