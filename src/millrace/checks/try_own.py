"""An algorithm and a schedule of the user, tried before the run."""

from __future__ import annotations

import asyncio

from millrace.checks.rehearsal import BrokenPromise, Scene, rehearse
from millrace.config.freeze import recorded
from millrace.config.schema import Config
from millrace.config.tables.algorithms import FunctionAlgorithm
from millrace.config.tables.schedules import FunctionSchedule
from millrace.core.errors import ConfigError, DeadlineExceeded, WorkerDied, boundary
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.schedule.presets import build

TARGET = "millrace.trainer.first_step:AlgorithmTrial"
SCENES = (Scene(), Scene(crash_probability=0.02, fail_probability=0.05))
SHOWN = 200  # characters of what a rehearsal says


def try_own(config: Config) -> list[str]:
    """Warnings, one sentence each. Raises: ConfigError: a function of the user raises, or makes no step."""
    warnings = []
    if isinstance(config.schedule, FunctionSchedule):
        warnings += _try_schedule(config, config.schedule.path)
    if isinstance(config.algorithm, FunctionAlgorithm):
        warnings += asyncio.run(_try_algorithm(config, config.algorithm.path))
    return warnings


async def _try_algorithm(config: Config, path: str) -> list[str]:
    """In a process of its own, like the trainer: the algorithm needs torch, and may hang."""
    runtime, limit_s = LocalRuntime(), config.supervision.spawn_timeout_s
    try:
        trial = await runtime.spawn("trainer", TARGET, {"config": recorded(config)}, timeout_s=limit_s)
        warnings: list[str] = await trial.call("tried", timeout_s=limit_s)
        return warnings
    except (WorkerDied, DeadlineExceeded) as error:
        raise ConfigError(f"`algorithm.path` ({path}) ends or blocks its process: {error}") from error
    finally:
        await runtime.close()


def _try_schedule(config: Config, path: str) -> list[str]:
    """Try its decisions on small runs in pure data, with and without crashes."""
    try:
        with boundary(f"`schedule.path` ({path})", "a rehearsal of its decisions", ConfigError):
            for scene in SCENES:
                schedule = build(config)
                schedule.describe()
                rehearse(schedule, scene, seed=0)
    except BrokenPromise as broken:
        return [f"`schedule.path` ({path}), in a rehearsal: {str(broken)[:SHOWN]}"]
    return []
