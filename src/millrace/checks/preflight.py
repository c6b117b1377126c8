"""Is this machine ready for this run? All checks run before anything starts, and all problems come at
once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from millrace.algorithms import of_run
from millrace.checks.model_problems import check_model, endless, model_problems
from millrace.checks.transport import refuse_transport
from millrace.config.carried import is_carried
from millrace.config.goes_together import oversized, refuse_start, uncorrected, unless_allowed
from millrace.config.inert import idle
from millrace.config.schema import Config
from millrace.config.tables.algorithms import Algorithm, FunctionAlgorithm
from millrace.config.tables.generation import Rollout
from millrace.config.tables.operation import RayCluster
from millrace.config.tables.schedules import FunctionSchedule, Schedule
from millrace.config.tables.task import MixtureTaskSection, members_of
from millrace.core.errors import ConfigError, DataError
from millrace.core.extras import refuse_missing
from millrace.core.wings import wing
from millrace.devices.inventory import gpu_faults
from millrace.engines.vllm import vllm_versions
from millrace.engines.vllm.vllm_arguments import refuse_missing_parts
from millrace.observe.sinks.open_sinks import refuse_unusable
from millrace.placement import describe
from millrace.placement.assign import size
from millrace.placement.describe import gpu_advice
from millrace.placement.hosts import Layout
from millrace.placement.memory.engine_memory import TRAJECTORY_BYTES
from millrace.placement.memory.needs import Needs, disk_bytes
from millrace.rollout.engine_kinds import cut_sampling, refuse_unable
from millrace.rollout.protocol import EngineOptions
from millrace.run.compose import engine_options, place
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime.local.spawned import PYTHON_MIN
from millrace.schedule.presets import build
from millrace.tasks.families import false_positives
from millrace.tasks.prepare import prepare_rows
from millrace.weights.store.directory import Directory

TEMPORARY_CHECKPOINTS = 1  # written before the oldest kept checkpoint is deleted
THREADS = "OMP_NUM_THREADS"
PYTHON_S = 60.0
PROCESSES_PER_CORE = 32


def preflight(config: Config, run_path: Path) -> list[str]:
    """Warnings, one sentence each.

    Raises: ConfigError naming everything that is missing. WeightsError: `weights.directory` cannot be listed.
    """
    missing = [*model_problems(Path(config.model.path)), *_file_problems(config), *contradictions(config)]
    if missing:
        raise ConfigError("\n".join(missing))
    refuse_unable(config)
    refuse_start(config)
    if config.optimizer.states != "float32":
        refuse_missing("torchao", '`optimizer.states` ("8bit")', "leave the key at float32")
    check_model(config)
    layout = place(config)
    placed = layout.main
    # Load the user's own functions here, to report their errors before the start.
    if not _is_carried(config.schedule):
        build(config)
    if not _is_carried(config.algorithm):
        of_run(config)
    disk = _disk_problem(config, placed.needs, run_path)
    if disk:
        raise ConfigError(disk)
    _check_processes(config, sum(placed.host.cores for placed in layout.placements))
    _check_step(config, placed.host.memory_bytes)
    _check_python(config.rollout)
    refuse_transport(config, layout)
    options = engine_options(config, RunDirectory(run_path), placed)
    refuse_missing_parts(options)
    _check_servers(config, options)
    if config.weights.directory is not None:
        Directory(config.weights.directory).entries()
    refuse_unusable(config.observe)
    faults = [] if isinstance(config.runtime, RayCluster) else gpu_faults(_gpus(layout))
    return [
        *faults,
        *describe.tight(layout, config),
        *gpu_advice(placed, config),
        *endless(config),
        *idle(config),
        *oversized(config),
        *_core_warnings(config, layout),
        *_thread_warnings(config),
        *_sandbox_warnings(config),
    ]


def contradictions(config: Config) -> list[str]:
    """Where each key alone is right: every contradiction that `allow` does not name. Empty: none."""
    return unless_allowed(
        config,
        uncorrected=uncorrected(config),
        cut_sampling=cut_sampling(config),
        false_positives=false_positives(config),
    )


def _sandbox_warnings(config: Config) -> Iterator[str]:
    """Raises: SandboxError: this machine has no sandbox as strong as a reward asks for."""
    rewards = [part.reward for part in config.by_part.values()]
    rewards += [config.of_evaluation(one).reward for one in config.evaluations]
    each = (one for reward in rewards for one in members_of(reward).values())
    for isolation in sorted({one.isolation for one in each if one.kind == "code"}):
        with wing("sandbox")(isolation) as sandbox:
            if sandbox.missing:
                yield f"{sandbox.description}. docs/sandbox.md says what it does not stop"


def _is_carried(section: Schedule | Algorithm) -> bool:
    return isinstance(section, FunctionSchedule | FunctionAlgorithm) and is_carried(section.path)


def _gpus(layout: Layout) -> set[int]:
    """The GPUs of this host that the run uses."""
    return {
        index for placed in layout.placements for _, spot, _ in placed.workers for index in spot.devices or ()
    }


def _file_problems(config: Config) -> Iterator[str]:
    for evaluation in config.evaluations:
        yield from (
            f"`evaluations` ({evaluation.name}): {problem}"
            for problem in _file_problems(config.of_evaluation(evaluation))
        )
    if isinstance(config.task, MixtureTaskSection):
        for name, part in config.by_part.items():
            yield from (f"`task.parts` ({name}): {problem}" for problem in _file_problems(part))
        return
    try:
        prepare_rows(config.one_task)
    except DataError as error:
        yield str(error)
    for reward in members_of(config.reward).values():
        if reward.kind == "function":
            file = reward.path.rpartition(":")[0]
            if file.endswith(".py") and not Path(file).is_file():
                yield f"`reward.path` ({reward.path}) names a file that does not exist"


def _disk_problem(config: Config, needs: Needs, run_path: Path) -> str:
    existing = next(path for path in [run_path.absolute(), *run_path.absolute().parents] if path.exists())
    free = shutil.disk_usage(existing).free
    checkpoints = config.checkpoints
    ever = -(-config.steps // checkpoints.every)  # one is made at the end
    best = sum(evaluation.keep_best for evaluation in config.evaluations)
    count = min(ever, checkpoints.keep + best + TEMPORARY_CHECKPOINTS)
    needed = disk_bytes(config, needs, count) - _replaced_bytes(RunDirectory(run_path))
    if needed <= free:
        return ""
    return (
        f"{existing} has {size(free)} free, but {count} checkpoints and the exported model need "
        f"{size(needed)}.\n  Choose another --run-dir, or lower `checkpoints.keep` ({checkpoints.keep})"
    )


def _replaced_bytes(run: RunDirectory) -> int:
    """What a resumed run deletes when newer files take their place."""
    files = (file for place in (run.checkpoints, run.model) for file in place.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _check_python(rollout: Rollout) -> None:
    """Raises: ConfigError: `rollout.python` cannot run a worker, or lacks the engine or a package for its
    drafts. Short-lived processes of this Python try it."""
    if rollout.python is not None:
        _ask(rollout.python, "-c", f"import sys, msgspec; sys.exit(sys.version_info < {PYTHON_MIN})")
    if rollout.engine == "vllm":
        asked = (key for key in vllm_versions.NEWER if getattr(rollout, key.removeprefix("rollout.")))
        _ask(rollout.python or sys.executable, vllm_versions.__file__, rollout.drafts or "", *asked)


def _check_servers(config: Config, options: EngineOptions) -> None:
    """Raises: ConfigError: a server of `rollout.servers` does not answer, or cannot serve this run, or
    does not know a setting of it."""
    if config.rollout.servers:
        from millrace.engines.server.connect import refuse_unfit  # it imports transformers, and so torch

        for server in config.rollout.servers:
            program = refuse_unfit(msgspec.structs.replace(options, server=server))
            refuse_unable(config, program)


def _ask(python: str, *arguments: str) -> None:
    try:
        command = [python, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_S, check=False)
        lines = done.stderr.strip().splitlines() or [
            f"it is older than Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]}"
        ]
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"`rollout.python` ({python}) cannot be started: {error}") from error
    if done.returncode != 0:
        raise ConfigError(
            f"`rollout.python` ({python}) cannot run a replica: {lines[-1]}\n"
            "  It needs msgspec and the packages that the engine imports; Millrace itself comes with the run"
        )


def _check_processes(config: Config, cores: int) -> None:
    """Raises: ConfigError: the run has so many processes that none would be ready in time."""
    rollout, workers, most = config.rollout, config.reward.workers, PROCESSES_PER_CORE * cores
    each = 1 if rollout.tensor == 1 else 1 + rollout.tensor  # one for each rank, and one that drives them
    each += rollout.engine == "vllm" and not rollout.stepwise  # vLLM's own process
    ranks = config.trainer.ranks - 1  # the first rank is not counted
    evaluators = each + len(config.evaluations) if config.evaluations else 0  # and their reward workers
    count = rollout.replicas * each + workers + ranks + evaluators + config.reference_apart
    if count > most:
        of_trainer = (
            f", `reward.workers` ({workers}) and {ranks + 1} ranks of the trainer"
            if ranks
            else (f" and `reward.workers` ({workers})")
        )
        raise ConfigError(
            f"`rollout.replicas` ({rollout.replicas}){of_trainer} make {count} "
            f"processes, and this host has {cores} cores.\n  Lower them to at most {most} processes together"
        )


def _check_step(config: Config, memory_bytes: int) -> None:
    """Raises: ConfigError: the controller's memory is too small for the trajectories of one batch."""
    batch, each = config.batch, config.trajectories_per_step
    if each * TRAJECTORY_BYTES > memory_bytes:
        raise ConfigError(
            f"a step takes {each:,} trajectories: `batch.prompts` ({batch.prompts:,}) x `batch.group_size` "
            f"({batch.group_size:,}).\n  The host has {size(memory_bytes)} of memory, and in the controller "
            "alone each takes a kilobyte: lower them"
        )


def _core_warnings(config: Config, layout: Layout) -> Iterator[str]:
    """More replicas, or more ranks of the trainer, than cores. Matmuls that only GPUs make faster."""
    placed, cores = layout.main, sum(placed.host.cores for placed in layout.placements)
    replicas = config.rollout.replicas
    here = 0 if config.rollout.servers else replicas * config.rollout.tensor
    if placed.device == "cpu" and here > cores:
        of_ranks = "" if config.rollout.tensor == 1 else f" of {config.rollout.tensor} processes"
        yield (
            f"{replicas} replicas{of_ranks} share {cores} cores with the trainer: more than {cores} generate "
            "no faster, lower `rollout.replicas`"
        )
    cores = placed.host.cores
    if placed.device == "cpu" and config.trainer.ranks_of_host > cores:
        yield (
            f"the trainer's {config.trainer.ranks_of_host} ranks share {cores} cores: more than {cores} "
            "train no faster, lower `trainer.shard`"
        )
    if placed.device == "cpu" and config.trainer.quantization is not None:
        yield (
            f'`trainer.quantization` ("{config.trainer.quantization}") makes steps slower on a CPU: it is '
            "for GPUs, and for trials of what it does to a run"
        )


def _thread_warnings(config: Config) -> Iterator[str]:
    threads, cores = os.environ.get(THREADS), len(os.sched_getaffinity(0))
    processes = config.rollout.replicas * config.rollout.tensor + config.trainer.ranks
    if threads and threads.isdigit() and int(threads) > 1 and int(threads) * processes > cores:
        yield (
            f"{THREADS}={threads} with {processes} torch processes on {cores} cores: threads that divide a "
            "product wait for one another. Unset it, and the placement chooses"
        )
