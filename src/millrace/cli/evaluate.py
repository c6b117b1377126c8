"""`millrace eval`: greedy and sampled accuracy and pass@k of a model on prompts of a task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from millrace.cli.evaluation import Attempt, Evaluation, summarize
from millrace.cli.options import AsJson, ConfigFile, Overrides
from millrace.config.load import load
from millrace.config.schema import Config, FileTask, GymTask
from millrace.core.types import Finish, Prompt, Sampling, ScoreRequest

HELD_OUT_SEED = 2

Completions = list[list[list[int]]]  # prompt, attempt, token


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="The model directory to evaluate. Default: `model.path`.")
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
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on a configuration's task."""
    config = load(config_file, overrides or ())
    held_out = held_out_config(config, model, seed=seed, data_seed=data_seed)
    result = evaluate(held_out, prompts=prompts, samples=samples, correct_at=correct_at)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(_table(result))
        if not isinstance(config.task, GymTask):
            console.print(
                "These are rows that training draws from. For held-out ones: "
                f"--set task.path={'OTHER_FILE' if isinstance(config.task, FileTask) else 'OTHER_FUNCTION'}"
            )


def held_out_config(config: Config, model: Path | None, *, seed: int, data_seed: int) -> Config:
    """The same task on other rows, where the task can make other rows, and another model."""
    task = config.task
    if isinstance(task, GymTask):
        task = task.model_copy(update={"data_seed": data_seed})
    chosen = config.model if model is None else config.model.model_copy(update={"path": str(model.resolve())})
    return config.model_copy(update={"task": task, "seed": seed, "model": chosen})


def evaluate(config: Config, *, prompts: int, samples: int, correct_at: float = 1.0) -> Evaluation:
    """Evaluate `config.model` on the first `prompts` prompts of `config.task`.

    One greedy completion and `samples` sampled ones (by `config.sampling`, noise from `config.seed`)
    per prompt, generated in this process and scored in an environment worker. Call from the main
    thread, with no event loop running.
    """
    from millrace.cli import scoring
    from millrace.rollout.generate import generate
    from millrace.rollout.load import load_engine

    asked = scoring.prompts(config, prompts)
    tokens = [prompt.tokens for prompt in asked]
    engine = load_engine(
        config.model.path,
        dtype=config.model.dtype,
        device=config.model.device,
        slots=config.rollout.slots,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        prefill_chunk=config.rollout.prefill_chunk,
    )
    s = config.sampling
    greedy = Sampling(s.max_tokens, temperature=0.0, stop_strings=s.stop)
    sampling = Sampling(
        s.max_tokens, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, stop_strings=s.stop
    )
    best = generate(engine, tokens, greedy, n=1, seed=config.seed)
    drawn = generate(engine, tokens, sampling, n=samples, seed=config.seed)
    rows = _attempts(config, asked, [b + d for b, d in zip(best, drawn, strict=True)])
    return summarize(
        config.model.path, [row[0] for row in rows], [row[1:] for row in rows], correct_at=correct_at
    )


def _attempts(config: Config, asked: list[Prompt], completions: Completions) -> list[list[Attempt]]:
    """Score every completion; a row per prompt."""
    from millrace.cli import scoring

    finish = _finisher(config)
    owners = [prompt.group_id for prompt, row in zip(asked, completions, strict=True) for _ in row]
    flat = [tokens for row in completions for tokens in row]
    requests = [
        ScoreRequest(index, group_id, tokens, finish(tokens))
        for index, (group_id, tokens) in enumerate(zip(owners, flat, strict=True))
    ]
    attempts = iter(
        Attempt(timed.score, truncated=request.finish is Finish.LENGTH)
        for request, timed in zip(requests, scoring.scores(config, requests), strict=True)
    )
    return [[next(attempts) for _ in row] for row in completions]


def _finisher(config: Config) -> Callable[[list[int]], Finish]:
    """Why a completion ended: at the budget, unless its last token happens to end it there."""
    from millrace.environments.tokenizer import load_tokenizer

    tokenizer, sampling = load_tokenizer(config.model.path), config.sampling

    def finish(tokens: list[int]) -> Finish:
        if len(tokens) < sampling.max_tokens or tokens[-1] == tokenizer.eos_token_id:
            return Finish.STOP
        text = tokenizer.decode(tokens) if sampling.stop else ""
        return Finish.STOP if any(stop in text for stop in sampling.stop) else Finish.LENGTH

    return finish


def _table(result: Evaluation) -> Table:
    table = Table(
        title=f"{result.model}, {result.num_prompts} prompts",
        title_justify="left",
        box=None,
        show_header=False,
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("greedy accuracy", f"{result.greedy_accuracy:.3f}")
    table.add_row(f"sampled accuracy ({result.num_samples} each)", f"{result.sampled_accuracy:.3f}")
    for k, value in result.pass_at_k.items():
        table.add_row(f"pass@{k}", f"{value:.3f}")
    table.add_row("reward, mean of samples", f"{result.reward_mean:.3f}")
    table.add_row("truncated share", f"{result.truncated_share:.3f}")
    table.add_row("completions without a reward", str(result.num_unscored))
    return table
