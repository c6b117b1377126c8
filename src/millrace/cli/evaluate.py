"""`millrace eval`: evaluates a model on a task, with prompts that training does not see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from millrace.cli.options import AsJson, ConfigFile, Overrides, print_json
from millrace.config.load import load
from millrace.config.tables.task import FileTaskSection, GymTaskSection
from millrace.estimates.evaluation import Evaluation
from millrace.evaluation.evaluate import HELD_OUT_SEED, evaluate, held_out_config
from millrace.evaluation.evaluated_runs import keep_if_of_a_run, trained_on
from millrace.observe.live.live_view import progress_line
from millrace.observe.terminal import Terminal
from millrace.run_directory.models import served_config
from millrace.runtime.process import check_kernel


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="A model, a checkpoint or a run. Default: `model.path`.")
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Rows and reward of one of `[[evaluations]]`, without `--data-seed`."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sampled completions per prompt.")] = 4,
    prompts: Annotated[
        int, typer.Option(min=1, help="How many prompts; all rows where there are fewer.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="Of sampling noise and prompt order.")] = 0,
    data_seed: Annotated[
        int, typer.Option(help="`task.data_seed` of a gym task: another one is held-out data.")
    ] = HELD_OUT_SEED,
    correct_at: Annotated[float, typer.Option(help="A reward of at least this is correct.")] = 1.0,
    with_trained: Annotated[
        bool, typer.Option("--with-trained", help="Also prompts that the run of the model was trained on.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on a configuration's task."""
    config = load(config_file, overrides or ())
    named = str(model or config.model.path)
    with served_config(config, model) as (served, chosen):
        held_out = held_out_config(served, None, seed=seed, data_seed=data_seed, evaluation=evaluation)
        check_kernel()  # which the reward worker needs
        trained = None if with_trained else trained_on(chosen, held_out)
        with progress(Terminal(stderr=True), named) as on_progress:
            result = evaluate(
                held_out,
                prompts=prompts,
                samples=samples,
                correct_at=correct_at,
                on_progress=on_progress,
                trained=trained,
            )
    result = replace(result, model=named)
    if trouble := keep_if_of_a_run(chosen, result):
        Terminal(stderr=True).print(trouble)
    if as_json:
        left_out = len(trained.left_out) if trained else 0
        print_json(result.to_json() | {"left_out": left_out})
    else:
        console = Terminal(soft_wrap=True)
        console.print(_table(result))
        if trained and trained.left_out:
            console.print(f"{trained}.")
        other_rows = trained or evaluation or _names_rows(overrides or ())
        if not (other_rows or isinstance(config.task, GymTaskSection)):
            console.print(
                "These are rows that training draws from. For held-out ones: "
                f"--set task.path=OTHER_{'FILE' if isinstance(config.task, FileTaskSection) else 'FUNCTION'}"
            )


@contextmanager
def progress(console: Console, model: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that shows how many of all completions have ended.

    On a terminal the function updates one line, which disappears at the end. Elsewhere the function prints a
    line every few seconds."""
    loading = f"Loading {model}"
    with progress_line(console, loading) as show:
        if not console.is_terminal or console.is_dumb_terminal:
            console.print(loading)

        def tell(ended: int, total: int) -> None:
            rewarded = ", now their rewards" if ended == total else ""
            show(f"{ended:,} of {total:,} completions{rewarded}", ended == total)

        yield tell


def _names_rows(overrides: Sequence[str]) -> bool:
    return any(one.partition("=")[0].strip() == "task.path" for one in overrides)


def _table(result: Evaluation) -> Table:
    table = Table(
        title=f"{result.model}, {result.num_prompts} prompts",
        title_justify="left",
        box=None,
        show_header=False,
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("", justify="right")

    def add(label: str, value: float, name: str) -> None:
        low, high = result.intervals.get(name, (math.nan, math.nan))
        table.add_row(label, f"{value:.3f}", "" if math.isnan(low) else f"{low:.3f} to {high:.3f}")

    add("greedy accuracy", result.greedy_accuracy, "greedy_accuracy")
    add(f"sampled accuracy ({result.num_samples} each)", result.sampled_accuracy, "sampled_accuracy")
    for k, value in result.pass_at_k.items():
        add(f"pass@{k}", value, f"pass_at_k.{k}")
    for k, value in result.majority_at_k.items():
        add(f"majority@{k}", value, f"majority_at_k.{k}")
    add("reward, mean of samples", result.reward_mean, "reward_mean")
    table.add_row("truncated share", f"{result.truncated_share:.3f}")
    table.add_row("completions without a reward", str(result.num_unscored))
    return table
