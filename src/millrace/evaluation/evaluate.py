"""Evaluates a model on a task. Greedy and sampled completions are scored as training scores them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from millrace.config.schema import Config
from millrace.config.tables.task import GymTaskSection, MixtureTaskSection
from millrace.controller.evaluation.prompt_attempt import attempts_of
from millrace.core.completion.columns import token_array
from millrace.core.errors import ConfigError, DataError
from millrace.core.types import Finish, Prompt, Sampling, ScoreRequest
from millrace.estimates.evaluation import Attempt, Evaluation, summarize
from millrace.evaluation import scoring
from millrace.evaluation.evaluated_runs import TrainedOn
from millrace.evaluation.generate import Completion, episode_player, generate
from millrace.rollout.protocol import Engine

HELD_OUT_SEED = 2


def held_out_config(
    config: Config, model: Path | None, *, seed: int, data_seed: int, evaluation: str | None = None
) -> Config:
    """The configuration with another model, and with other rows if the task can make other rows.

    Args:
        evaluation: one of `[[evaluations]]`, whose rows and reward are in place of those of training.
    Raises:
        ConfigError: there is none of that name, or it is a canary; the task is a mixture.
    """
    if evaluation is not None:
        config = _of_evaluation(config, evaluation)
    task = config.task
    if isinstance(task, GymTaskSection) and evaluation is None:
        task = task.model_copy(update={"data_seed": data_seed})
    if isinstance(task, MixtureTaskSection):
        raise ConfigError(
            '`task.kind` is "mixture": evaluate on one task, whose rows are not trained on.\n'
            "  Name it: --set task.kind=file --set task.path=FILE, and its `[reward]`"
        )
    chosen = config.model if model is None else config.model.model_copy(update={"path": str(model.resolve())})
    return config.model_copy(update={"task": task, "seed": seed, "model": chosen})


def _of_evaluation(config: Config, name: str) -> Config:
    sections = {section.name: section for section in config.evaluations if section.canary is None}
    if name not in sections:
        raise ConfigError(
            f"there is no evaluation {name!r} to run again.\n"
            f"  `[[evaluations]]` that are no canaries: {', '.join(sections) or 'none'}"
        )
    return config.of_evaluation(sections[name])


def evaluate(
    config: Config,
    *,
    prompts: int,
    samples: int,
    correct_at: float = 1.0,
    on_progress: Callable[[int, int], None] = lambda ended, total: None,
    trained: TrainedOn | None = None,
) -> Evaluation:
    """Evaluate `config.model` on the first `prompts` prompts of `config.task`.

    Each prompt has one greedy completion and `samples` sampled completions (by `config.sampling`, noise from
    `config.seed`). With an environment each is an episode. This process generates; a reward worker scores.
    `on_progress` gets the number of completions that have ended, and the number of all. Prompts of `trained`
    are left out. Call from the main thread, with no event loop running.

    Raises: DataError: no prompt is left.
    """
    from millrace.devices.device import torch_device

    torch_device(config.model.device)  # refused before a worker starts
    if trained is None:
        chosen = scoring.prompts(config, prompts)
    else:
        chosen = scoring.prompts(config, prompts, trained.leaves_out)
        trained.refuse_if_none(chosen)
    tokens = [prompt.tokens for prompt in chosen]
    engine = serving_engine(config)
    sampling = plain_sampling(config)
    greedy = replace(sampling, temperature=0.0)
    ended, total = itertools.count(1), len(chosen) * (1 + samples)

    def on_end() -> None:
        on_progress(next(ended), total)

    if config.reward.kind == "environment":
        rows = asyncio.run(_played(config, chosen, engine, samples, on_end))
    else:
        best = generate(engine, tokens, greedy, n=1, seed=config.seed, on_end=on_end)
        drawn = generate(engine, tokens, sampling, n=samples, seed=config.seed, on_end=on_end)
        rows = _attempts(config, chosen, [b + d for b, d in zip(best, drawn, strict=True)])
    return summarize(
        config.model.path, [row[0] for row in rows], [row[1:] for row in rows], correct_at=correct_at
    )


async def _played(
    config: Config, prompts: list[Prompt], engine: Engine, samples: int, on_end: Callable[[], None]
) -> list[list[Attempt]]:
    """Play every episode; a row per prompt. Raises: DataError: no agent makes a request."""
    attempts = attempts_of(prompts, samples, own_prompts=config.own_prompts)
    async with episode_player(config, engine) as player:
        await player.play(attempts, plain_sampling(config), config.seed, on_end)
    if not any(one.trajectory.columns for one in attempts):
        raise DataError(f"no episode has begun; the last one: {getattr(attempts[-1].score, 'reason', '')}")
    played = [one.result() for one in attempts]
    return [played[start : start + 1 + samples] for start in range(0, len(played), 1 + samples)]


def serving_engine(config: Config) -> Engine:
    """An engine of this process that serves `config.model` as `config.rollout` says."""
    from millrace.engines.own.load_engine import load_engine

    return load_engine(
        config.model.path,
        dtype=config.model.dtype,
        device=config.model.device,
        slots=config.rollout.slots,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        prefill_chunk=config.rollout.prefill_chunk,
        exact=config.rollout.exact,
    )


def plain_sampling(config: Config) -> Sampling:
    """`config.sampling` without what only training needs."""
    return replace(Sampling(**dict(config.sampling)), logprobs=0, token_masks=False, routing=False)


def _attempts(
    config: Config, prompts: list[Prompt], completions: list[list[Completion]]
) -> list[list[Attempt]]:
    """Score every completion; a row per prompt."""
    owners = [prompt for prompt, row in zip(prompts, completions, strict=True) for _ in row]
    flat = [completion for row in completions for completion in row]
    requests = [
        ScoreRequest(index, owner.group_id, token_array(one.tokens), one.finish, row_digest=owner.row_digest)
        for index, (owner, one) in enumerate(zip(owners, flat, strict=True))
    ]
    attempts = iter(
        Attempt(timed.score, truncated=request.finish is Finish.LENGTH)
        for request, timed in zip(requests, scoring.scores(config, requests, answers=True), strict=True)
    )
    return [[next(attempts) for _ in row] for row in completions]
