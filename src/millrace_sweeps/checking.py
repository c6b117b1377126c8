"""All trials are looked at before the first starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.api.checked import check
from millrace.checks.preflight import preflight
from millrace.config.carried import is_carried
from millrace.config.freeze import dump
from millrace.config.load import validate
from millrace.config.schema import Config
from millrace.core.errors import ConfigError, MillraceError
from millrace.run_directory.going_on import begun_as, checkable
from millrace.run_directory.resume import diff
from millrace.run_directory.run_directory import RunDirectory
from millrace_sweeps import trial_record as record
from millrace_sweeps.decisions.naming import trial_name
from millrace_sweeps.decisions.space import Overrides, identity
from millrace_sweeps.loading import LoadedSweep, check_metric, figure_by


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
