"""The directory of a trial that begins, with the weights of another run where `model.path` names one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from millrace.api.configure import PreparedConfig
from millrace.api.train import write_start
from millrace.config.schema import Config
from millrace.run_directory.going_on import Start, find_start, start_in
from millrace.run_directory.lineage import read_parent
from millrace.run_directory.models import CHECKPOINT
from millrace.run_directory.run_directory import RunDirectory
from millrace_sweeps.trial_record import Trials


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
