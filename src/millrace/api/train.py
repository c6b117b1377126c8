"""`millrace.train`: from functions and rows of a script to a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from millrace.api.callbacks import OnRecord, refuse_unheard
from millrace.api.configure import Components, ConfigLike, PreparedConfig, check, prepare
from millrace.api.helper_process import ask, info
from millrace.api.run import Run
from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.run.going_on import Start, find_start, start_in
from millrace.run_directory import run_directory
from millrace.run_directory.run_directory import RunDirectory

if TYPE_CHECKING:  # a stub alone
    from millrace.api.keys import TrainKeys

OWN_KEYWORDS = (
    "reward",
    "rows",
    "algorithm",
    "schedule",
    "from_run",
    "moments",
    "run_dir",
    "wait",
    "show",
    "on_step",
    "on_evaluation",
)


def train(
    config: ConfigLike = None,
    *,
    reward: Callable[..., Any] | str | Mapping[str, Any] | list[Any] | None = None,
    rows: Sequence[Mapping[str, Any]] | Any = None,
    algorithm: Any = None,
    schedule: Any = None,
    from_run: str | os.PathLike[str] | Run | None = None,
    moments: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    wait: bool = True,
    show: bool = True,
    on_step: OnRecord | None = None,
    on_evaluation: OnRecord | None = None,
    **keywords: Unpack[TrainKeys],
) -> Run:
    """Train a model with reinforcement learning, in other processes.

    Functions are pickled for those processes and kept in the run directory. A function may be defined in a
    script, in a notebook or in another function. The rows are kept there too. So the run can be resumed
    without the script.

    Args:
        config: a TOML file, a dict with the same tables and keys, or a `millrace.Config`.
        reward: `reward(completion, answer, **columns)`, plain or async (docs/rewards.md); or the name of a
            kind, or a dict with its keys. A list is their sum, each with a weight if it has one:
            `[right, (short, 0.2)]`.
        rows: a sequence of dicts, a `datasets.Dataset` or a pandas frame, with a column `prompt` and, for
            a reward that compares, `answer`. The rows replace the task of `config`.
        algorithm: a `millrace.algorithms.Algorithm`, the name of a kind, or a dict with its keys.
        schedule: a function of the configuration that returns a `millrace.schedule.Schedule`, the name of
            a kind, or a dict with its keys.
        from_run: a `Run`, `"RUN"`, `"RUN@VERSION"` or a checkpoint, from whose weights this new run begins.
            Without `config` it is configured as that run (docs/sweeps.md).
        moments: begin with the optimizer's moments of `from_run` too.
        run_dir: the run's directory. Default: `runs/NAME-DATE-N`.
        wait: return when the run has ended; False: return at once. The run then trains in the background, and
            ends with this process if it has not ended before.
        show: print the progress while waiting.
        on_step, on_evaluation: functions that are called with each step and evaluation, as of `Run.wait`.
        keywords: configuration keys, over those of `config`: `steps=20`, `optimizer={"lr": 1e-4}`. A key
            with a dot is passed as `**{"optimizer.lr": 1e-4}`.
    Raises:
        ConfigError, DataError, RewardError: an argument is wrong; nothing was started.
        KeyboardInterrupt: the user interrupted; the step was finished and saved.
        MillraceError: the error that ended the run.
    """
    refuse_unheard(wait, on_step, on_evaluation)
    given: dict[str, Any] = {**keywords}
    start = _start(from_run, moments, given)
    if start is not None:
        config = start.run.read_config() if config is None else config
        given["model.path"] = start.model
    prepared = prepare(config, Components(reward, rows, algorithm, schedule), given, OWN_KEYWORDS)
    name = Path(config).stem if isinstance(config, str | os.PathLike) else start.name if start else "run"
    run = _begin(prepared, start or start_in(prepared.config), name, run_dir)
    if show:
        info(f"Run directory: {run.path}")
    run._start(prepared.config.observe.notify)
    return run.wait(show=show, on_step=on_step, on_evaluation=on_evaluation) if wait else run


def _begin(
    prepared: PreparedConfig,
    start: Start | None,
    name: str,
    run_dir: str | os.PathLike[str] | None,
) -> Run:
    """A run directory with all that the run needs. On an error it is removed."""
    if start is not None:
        prepared.config = start.fitted(prepared.config)
        info(f"Begins with {start}")
    chosen = Path(run_dir) if run_dir is not None else None
    check(prepared, chosen or run_directory.RUNS)
    directory = run_directory.create(name, chosen)
    try:
        prepared.place(directory.path)
        if start is not None:
            prepared.config = write_start(start, prepared.config, directory)
        directory.write_config(prepared.config)
    except BaseException:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return Run(directory.path)


def write_start(start: Start, config: Config, directory: RunDirectory) -> Config:
    """Write the start into a new run's directory, by another process. Returns `config` with it."""
    begun = {"parent": str(start.run.path), "source": str(start.source), "version": start.version}
    ask("begin", {"run": str(directory.path), **begun, "moments": start.moments})
    return start.own(config, directory)


def _start(from_run: str | os.PathLike[str] | Run | None, moments: bool, keywords: Any) -> Start | None:
    if from_run is None:
        if moments:
            raise ConfigError("`moments` goes with `from_run`")
        return None
    model = keywords.get("model")
    if "model.path" in keywords or (isinstance(model, Mapping) and "path" in model):
        raise ConfigError("`from_run` names the weights, and `model.path` others: leave one out")
    return find_start(from_run.path if isinstance(from_run, Run) else from_run, moments=moments)
