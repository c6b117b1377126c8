"""`millrace quickstart`: makes a small model on one small machine and improves it.

A small model with its own tokenizer learns a reasoning-gym task from demonstrations, most of which are wrong.
So the model samples right and wrong completions. Asynchronous RL with two replicas then makes right
completions frequent. Half-way a replica is killed with SIGKILL. Nothing is downloaded.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from millrace.cli.options import Overrides
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.estimates.evaluation import Evaluation
from millrace.evaluation.evaluate import HELD_OUT_SEED, evaluate, held_out_config
from millrace.evaluation.evaluated_runs import keep
from millrace.observe.terminal import Terminal, print_checks, typed
from millrace.quickstart.checks import GAP_MAX, checks
from millrace.quickstart.saboteur import Saboteur
from millrace.quickstart.start_model import make_start_model
from millrace.run import compose
from millrace.run.interrupt import run_stoppable
from millrace.run_directory import run_directory
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime.process import check_kernel

EVALUATED_PROMPTS = 200

console = Terminal(soft_wrap=True)


def command(
    directory: Annotated[Path, typer.Option("--run-dir", help="Where everything is written.")] = Path(
        "runs/quickstart"
    ),
    overwrite: Annotated[bool, typer.Option(help="Remove an earlier quickstart there first.")] = True,
    sets: Overrides = None,
) -> None:
    """Make a small model, improve it by asynchronous RL, kill a replica on the way, and check it all."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    check_kernel()
    config = _prepare(directory, overwrite, sets or [])
    _print_stage("1/4", "warm start: a small model learns from demonstrations, most of them wrong")
    make_start_model(config, directory, console)
    _print_stage("2/4", "evaluate it on held-out prompts")
    before = _evaluate(config, Path(config.model.path))
    _print_stage(
        "3/4", f"train: {config.steps} steps, schedule `{config.schedule.kind}`; a replica will be killed"
    )
    run = run_directory.create("run", directory / "run")
    saboteur = Saboteur(at_version=config.steps // 2)
    _train(config, run, saboteur)
    _print_stage("4/4", "evaluate what it learned")
    after = _evaluate(config, run.model)
    for version, result in (0, before), (config.steps, after):
        keep(run, version, result)
    _report(before, after)
    console.print()
    passed = print_checks(console, checks(before, after, run, saboteur))
    console.print(f"\n{time.monotonic() - started:.0f} s. Look around: {look_around(run.path)}")
    raise typer.Exit(0 if passed else 1)


def look_around(run: Path) -> str:
    """The command that shows the run."""
    return f"{typed()} show {shlex.quote(str(run))}"


def _prepare(directory: Path, overwrite: bool, sets: list[str]) -> Config:
    if directory.exists():
        if not overwrite or not (directory / "quickstart.toml").exists():
            raise ConfigError(f"{directory} exists already: remove it, or name another --run-dir")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, mode=0o700)
    target = directory / "quickstart.toml"
    target.write_text(files("millrace.quickstart").joinpath("quickstart.toml").read_text())
    config = load(target, sets)
    for section in ("rollout", "trainer"):
        if (quantization := getattr(config, section).quantization) is None:
            continue
        raise ConfigError(
            f"`{section}.quantization` ({quantization}): the quickstart checks that replicas "
            f"and trainer give a token the same log-prob, to {GAP_MAX:.0e}, and rounded weights do not.\n"
            "  Leave it out here. `millrace train` takes it, and `millrace doctor` judges the distance"
        )
    return config


def _print_stage(stage: str, text: str) -> None:
    console.print(Text.assemble("\n", (stage, "bold"), " ", text))


def _train(config: Config, run: RunDirectory, saboteur: Saboteur) -> None:
    view = Terminal()

    def body(stop: asyncio.Event) -> Any:
        return compose.train(config, run, stop, saboteur, console=view)

    grace_s = config.supervision.stop_grace_s
    if not run_stoppable(body, view.print, at_once=view.show_cursor, grace_s=grace_s):
        console.print(f"Stopped. `{typed()} quickstart` begins anew.")
        raise typer.Exit(130)


def _evaluate(config: Config, model: Path) -> Evaluation:
    held_out = held_out_config(config, model, seed=0, data_seed=HELD_OUT_SEED)
    result = evaluate(held_out, prompts=EVALUATED_PROMPTS, samples=4)
    console.print(f"greedy {result.greedy_accuracy:.3f}, sampled {result.sampled_accuracy:.3f}")
    return result


def _report(before: Evaluation, after: Evaluation) -> None:
    rows: list[tuple[str, Callable[[Evaluation], float]]] = [
        ("greedy accuracy", lambda e: e.greedy_accuracy),
        ("sampled accuracy", lambda e: e.sampled_accuracy),
        ("pass@4", lambda e: e.pass_at_k[4]),
    ]
    console.print()
    for name, value in rows:
        console.print(f"{name:18} {value(before):.3f} -> {value(after):.3f}")
