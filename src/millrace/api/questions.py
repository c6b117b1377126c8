"""`millrace.evaluate`, `millrace.simulate` and `millrace.plan`. A process answers each call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

from millrace.api.configure import Components, ConfigLike, PreparedConfig, configure, prepare
from millrace.api.helper_process import ask
from millrace.api.plain_records import Records
from millrace.api.run import Run
from millrace.config.freeze import dump
from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.core.wings import wing
from millrace.estimates.evaluation import Evaluation
from millrace.evaluation.evaluate import HELD_OUT_SEED
from millrace.run_directory.run_directory import RunDirectory

if TYPE_CHECKING:  # a stub alone
    from millrace.api.keys import EvaluateKeys


def evaluate(
    config: ConfigLike | Run = None,
    *,
    model: str | os.PathLike[str] | None = None,
    reward: Callable[..., Any] | str | Mapping[str, Any] | list[Any] | None = None,
    rows: Sequence[Mapping[str, Any]] | Any = None,
    evaluation: str | None = None,
    prompts: int = 100,
    samples: int = 4,
    noise_seed: int = 0,
    data_seed: int = HELD_OUT_SEED,
    correct_at: float = 1.0,
    with_trained: bool = False,
    **keywords: Unpack[EvaluateKeys],
) -> Evaluation:
    """Evaluate a model on a task: greedy and sampled accuracy, pass@k, mean reward.

    Args:
        config: as of `train`, or a `Run`. Of a `Run`, the configuration and the trained model are used.
        model: a directory of a model, of a checkpoint or of a run. Default: the run's, or `model.path`.
        reward, rows: as of `train`. Give rows that training does not draw from.
        evaluation: the name of one of `evaluations`: its rows and reward, without `data_seed`.
        prompts: number of prompts; all rows if the task has fewer.
        samples: sampled completions per prompt, in addition to a greedy completion.
        noise_seed: seed of sampling and of the order of prompts.
        data_seed: `task.data_seed` of a gym task. Another seed than in training makes held-out data.
        correct_at: a reward of at least this is correct.
        with_trained: also prompts that the run of the model was trained on. They are left out otherwise.
        keywords: configuration keys, as of `train`.
    Raises:
        ConfigError, DataError, RewardError: an argument is wrong.
    """
    if isinstance(config, Run):
        model = model or (config.model if config.model.exists() else config.path)
        config = config.config
    own = (
        *("model", "reward", "rows", "evaluation", "prompts", "samples"),
        *("noise_seed", "data_seed", "correct_at", "with_trained"),
    )
    prepared = prepare(config, Components(reward, rows), keywords, own)
    held_out = {
        "model": str(Path(model).absolute()) if model else None,
        "data_seed": data_seed,
        "evaluation": evaluation,
        "with_trained": with_trained,
    }
    settings = {"prompts": prompts, "samples": samples, "correct_at": correct_at}
    with TemporaryDirectory(prefix="millrace-") as scratch:
        run = _placed(prepared, Path(scratch))
        arguments = {"run": run, "held_out": held_out | {"seed": noise_seed}, "settings": settings}
        answer = ask("evaluate", arguments)
    return Evaluation.of_json(answer)


def simulate(
    config: ConfigLike = None,
    *,
    run: Run | str | os.PathLike[str] | None = None,
    compare: Sequence[str] = (),
    seeds: int = 1,
    seed: int | None = None,
    jobs: int = 1,
    **keywords: Any,
) -> Records:
    """Predict a run on a cluster that need not exist: the real controller, in virtual time.

    Args:
        config: a simulated configuration (TOML file, dict or object: docs/planning.md). With `run`: the
            next run's configuration, by default that run's own.
        run: a run, or its directory. The simulation uses its lengths and costs.
        compare: names of schedules, or `["presets"]`. Default: the configuration's schedule.
        seeds: runs of each schedule. All schedules have the same lengths, latencies and failures.
        seed: the first seed. Default: the configuration's.
        jobs: number of processes.
        keywords: configuration keys over those of `config`.
    Returns:
        one record per schedule and seed: `schedule`, `seed`, `step_s`, `trained_tokens_per_s` and more.
    Raises:
        ConfigError, DataError: an argument is wrong.
    """
    own = ("run", "compare", "seeds", "seed", "jobs")
    path = str(run.path) if isinstance(run, Run) else (str(Path(run).absolute()) if run else None)
    schema: type[Section] = wing("sim.SimulatedConfig") if path is None else Config
    base = Run(path).config if path is not None and config is None and keywords else config
    wanted = base is not None or path is None
    checked = dump(configure(schema, base, keywords, own)) if wanted else None
    arguments = {"config": checked, "run": path, "names": list(compare)}
    return Records(ask("sim.simulate", arguments | {"seeds": seeds, "seed": seed, "jobs": jobs}))


def plan(config: ConfigLike = None, **keywords: Any) -> dict[str, Any]:
    """Split a cluster: which devices train, which generate, in which shape, under which schedule.

    Args:
        config: the request to the planner (TOML file, dict or object: docs/planning.md).
        keywords: keys over those of `config`.
    Returns:
        plain types: `ranking`, a list with a dict per simulated plan, the fastest first; `bottleneck`,
        `gains`, `theory`; `checkpoints`, how often to save; and `configuration`, the first plan as TOML that
        `train` accepts.
    Raises:
        ConfigError: an unknown model or device, or nothing fits.
    """
    question = configure(wing("sim.PlanConfig"), config, keywords, ())
    directory = Path(config).parent if isinstance(config, str | os.PathLike) else Path()
    base = str((directory / question.base).absolute()) if question.base else None
    return dict(ask("sim.plan", {"config": dump(question), "base": base}))


def _placed(prepared: PreparedConfig, scratch: Path) -> str:
    """Write a configuration and its files into `scratch`, which only this user can read."""
    directory = RunDirectory(scratch.resolve())
    prepared.place(directory.path)
    directory.write_config(prepared.config)
    return str(directory.path)
