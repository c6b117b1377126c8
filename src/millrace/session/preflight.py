"""Is this machine ready for this run? Asked before anything starts, answered in one go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.environments import tokenizer
from millrace.schedule.presets import build
from millrace.session.estimate import Estimate, estimate

TEMPORARY_CHECKPOINTS = 1  # written beside the kept ones before the oldest goes
THREADS = "OMP_NUM_THREADS"


def preflight(config: Config, run_path: Path) -> list[str]:
    """Warnings, one sentence each. Raises: ConfigError naming everything that is missing."""
    missing = [*_model_problems(Path(config.model.path)), *_file_problems(config)]
    if missing:
        raise ConfigError("\n".join(missing))
    needs = estimate(config)
    build(config)  # a schedule of one's own is loaded: what is wrong with it is told here
    disk = _disk_problem(config, needs, run_path)
    if disk:
        raise ConfigError(disk)
    return [*_memory_warnings(needs), *_thread_warnings(config)]


def _model_problems(directory: Path) -> Iterator[str]:
    if not directory.is_dir():
        yield (
            f"`model.path` ({directory}) is not a directory.\n  Name a Hugging Face model directory. "
            "Nothing is downloaded by itself: `hf download OWNER/MODEL --local-dir DIRECTORY` makes one"
        )
        return
    if not (directory / "config.json").is_file():
        yield f"`model.path` ({directory}) has no config.json"
    if not any(directory.glob("*.safetensors")):
        yield f"`model.path` ({directory}) has no *.safetensors weights"
    if not any((directory / name).is_file() for name in tokenizer.FILES):
        yield f"`model.path` ({directory}) has no tokenizer ({' or '.join(tokenizer.FILES)})"


def _file_problems(config: Config) -> Iterator[str]:
    if config.task.kind == "file" and not Path(config.task.path).exists():
        yield f"`task.path` ({config.task.path}) does not exist"
    if config.reward.kind == "function":
        file = config.reward.path.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield f"`reward.path` ({config.reward.path}) names a file that does not exist"


def _disk_problem(config: Config, needs: Estimate, run_path: Path) -> str:
    existing = next(path for path in [run_path.absolute(), *run_path.absolute().parents] if path.exists())
    free = shutil.disk_usage(existing).free
    count = config.checkpoints.keep + TEMPORARY_CHECKPOINTS
    needed = count * needs.checkpoint_bytes + needs.weights_bytes
    if needed <= free:
        return ""
    return (
        f"{existing} has {gigabytes(free)} free, but {count} checkpoints and the exported model need "
        f"{gigabytes(needed)}.\n  Choose another --run-dir, or lower `checkpoints.keep` "
        f"({config.checkpoints.keep})"
    )


def _memory_warnings(needs: Estimate) -> Iterator[str]:
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needs.total_bytes > available:
        yield (
            f"the run needs about {gigabytes(needs.total_bytes)} for weights, optimizer and KV, and this "
            f"machine has {gigabytes(available)}"
        )


def _thread_warnings(config: Config) -> Iterator[str]:
    threads, cores = os.environ.get(THREADS), len(os.sched_getaffinity(0))
    processes = config.rollout.replicas + 1
    if threads and threads.isdigit() and int(threads) > 1 and int(threads) * processes > cores:
        yield (
            f"{THREADS}={threads} with {processes} torch processes on {cores} cores: their threads will spin "
            f"on each other. Unset it, and each process gets its share"
        )


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
