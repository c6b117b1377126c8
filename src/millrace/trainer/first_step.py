"""A trial of the user's own algorithm on a small batch before the run, so that mistakes are found early.

The step is a real step, of a model with a few weights. Shape suffix: N = tokens.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.algorithms import Algorithm, of_run
from millrace.config.schema import Config
from millrace.config.tables.algorithms import FunctionAlgorithm
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.errors import ConfigError, TrainingError, WeightsError
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.row_attention import NAME
from millrace.trainer.trainer import PolicyTrainer

VOCABULARY = 16
GROUPS = 4
GROUP_SIZE_MAX = 64
LENGTH_MAX = 12
OURS = Path(__file__).resolve().parents[3]


class AlgorithmTrial:
    """Role `millrace.trainer.first_step:AlgorithmTrial`: `algorithm.path`, before the run."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = Config.model_validate(config)

    async def tried(self) -> list[str]:
        """Warnings, one sentence each. Raises: ConfigError: the algorithm cannot make a step."""
        return await asyncio.to_thread(try_algorithm, self._config)


def try_algorithm(config: Config) -> list[str]:
    """Train on one batch. One of its groups has equal rewards, the budget cut one completion, and half of the
    tokens are one version old.

    Raises: ConfigError: the algorithm raises, its loss is not finite, or the loss is not one number a token.
    """
    assert isinstance(config.algorithm, FunctionAlgorithm), config.algorithm
    algorithm, path = of_run(config), config.algorithm.path
    settings = StepSettings(
        optimizer=Optimizer(),
        token_budget=config.batch.token_budget,
        max_tokens=config.sampling.max_tokens,
        temperature=1.0,
        dtype=torch.float32,
        published=torch.float32,
        minibatches=min(config.batch.minibatches, GROUPS),
        epochs=config.batch.epochs,
    )
    reference = _model() if algorithm.needs_reference else None
    trainer = PolicyTrainer(_model(), _checked(algorithm), settings, reference=reference)
    with TemporaryDirectory(prefix="millrace-") as rejected, _config_errors(path):
        metrics = trainer.step(small_batch(config), rejected_dir=Path(rejected)).metrics
    if metrics["grad_norm"] == 0:
        return [f"`algorithm.path` ({path}): on a small batch no token gets a gradient"]
    return []


def small_batch(config: Config) -> Batch:
    random, size = np.random.default_rng(0), min(config.batch.group_size, GROUP_SIZE_MAX)
    logprob, length_max = -float(np.log(VOCABULARY)), min(config.sampling.max_tokens, LENGTH_MAX)
    groups = []
    for group_id in range(GROUPS):
        sequences = []
        for member in range(size):
            length = 1 + member % length_max
            versions = [0] * (length // 2) + [1] * (length - length // 2)
            tokens = random.integers(0, VOCABULARY, length).tolist()
            logprobs = (logprob + random.normal(0, 0.05, length)).tolist()
            columns = TokenColumns.of(tokens, logprobs, versions)
            reward = 1.0 if group_id == 0 else float(member % 2)
            trajectory_id, truncated = group_id * size + member, member == size - 1
            sequences.append(TrainSequence(trajectory_id, columns, reward, truncated=truncated))
        groups.append(TrainGroup(group_id, token_array([1, 2, 3]), sequences))
    return Batch(1, groups)


def _model() -> PreTrainedModel:
    """A model in which all tokens are about equally likely."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()


def _checked(algorithm: Algorithm) -> Algorithm:
    """`algorithm`, with a check of the loss's shape: a loss of another shape would be broadcast."""

    def objective(xp: Any, logprobs: Any, advantages_N: Any) -> Any:
        loss_N = algorithm.objective(xp, logprobs, advantages_N)
        shape, expected = tuple(getattr(loss_N, "shape", ())), tuple(advantages_N.shape)
        if shape != expected:
            raise ConfigError(
                f"`objective` returns the shape {shape}, and {expected[0]} tokens need {expected}"
            )
        return loss_N

    return replace(algorithm, objective=objective)


@contextmanager
def _config_errors(path: str) -> Iterator[None]:
    remedy = "Correct it: nothing was started"
    try:
        yield
    except (TrainingError, WeightsError) as error:
        reason = str(error).partition(": ")[2].partition(";")[0]
        raise ConfigError(
            f"`algorithm.path` ({path}) fails on a small batch, in which one group has equal rewards: "
            f"{reason}.\n  {remedy}"
        ) from error
    except Exception as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"`algorithm.path` ({path}) fails on a small batch: {kind}{error}{_where(error)}\n  {remedy}"
        ) from error


def _where(error: BaseException) -> str:
    """The last line of the user's own code, if any."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    users = [f for f in frames if "site-packages" not in f.filename and OURS not in Path(f.filename).parents]
    return f"\n  at {users[-1].filename}:{users[-1].lineno}, in {users[-1].name}" if users else ""
