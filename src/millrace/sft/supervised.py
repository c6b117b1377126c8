"""Supervised training on (prompt, completion) pairs, with the model, packing and log-probs of the trainer.

Shape suffix: N = trained tokens of one row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.config.tables.training import Optimizer
from millrace.core.errors import DataError, TrainingError
from millrace.devices.device import torch_device
from millrace.trainer.batch.packing import Branch, Row, Tree, pack
from millrace.trainer.files.companion_files import read_tokenizer
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.export import save_model
from millrace.trainer.model import load_model, named_weights, not_finite, row_logprobs
from millrace.trainer.optimizer import clip_gradients, grad_norm, is_matrix, make_adamw

WARMUP_FRACTION = 0.05  # of the steps
GRAD_CLIP = 1.0

Example = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class SFTStep:
    """`loss` is the mean negative log-prob of a completion token, in nats."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int  # forwarded, prompts included
    step_s: float


def sft(
    model_dir: str | Path,
    examples: Sequence[Example],
    *,
    out_dir: str | Path,
    steps: int,
    lr: float,
    batch_tokens: int,
    optimizer: Literal["adamw", "muon"] = "adamw",
    row_tokens: int = 8192,
    seed: int = 0,
    device: str = "auto",
    on_step: Callable[[SFTStep], None] | None = None,
) -> list[SFTStep]:
    """Train the model of `model_dir` to continue each prompt with its completion; save it in `out_dir`.

    The loss is the mean over completion tokens; prompts are not trained on. The learning rate warms up
    and then falls linearly to zero. Examples are drawn without replacement, reshuffled every epoch from
    `seed`.

    Units:
        batch_tokens  about so many prompt and completion tokens per optimizer step
        row_tokens    per micro-batch; changes speed and memory, never a gradient
        optimizer     "muon": Muon for the matrices of the layers (with AdamW's update size, so one
                      `lr` serves both), AdamW for the rest
    Raises:
        DataError: no examples, an empty prompt or completion, or a token that the model lacks.
        TrainingError: a loss, a gradient or a trained weight is not finite. Nothing is saved.
    """
    _check(examples)
    model = load_model(model_dir, torch_device(device))
    _check_tokens(examples, model.config.vocab_size)
    optimizers = _optimizers(model, optimizer, Optimizer(lr=lr))
    warmup = max(1, round(WARMUP_FRACTION * steps))
    batches = _batches(examples, batch_tokens, np.random.default_rng(seed))
    history = []
    for step in range(steps):
        rate = lr * min((step + 1) / warmup, (steps - step) / max(1, steps - warmup + 1))
        for group in [group for each in optimizers for group in each.param_groups]:
            group["lr"] = rate
        with _explained(step, steps, lr):
            loss, norm, tokens, step_s = _step(model, optimizers, pack(next(batches), row_tokens))
        history.append(SFTStep(step, loss, norm, rate, tokens, step_s))
        if on_step is not None:
            on_step(history[-1])
    if broken := not_finite(named_weights(model)):
        raise TrainingError(
            f"supervised training: after step {steps} these weights are not finite: {broken[:4]}. "
            f"Nothing was saved.\n  Lower `lr` ({lr:g})"
        )
    with atomic_directory(Path(out_dir), marker="config.json") as path:
        save_model(model, read_tokenizer(model_dir), path, torch.float32)
    return history


@contextmanager
def _explained(step: int, steps: int, lr: float) -> Iterator[None]:
    """Adds to an error the step and the remedy. Tokens are integers, so only weights can be at fault."""
    try:
        yield
    except TrainingError as error:
        advice = (
            f"Lower `lr` ({lr:g})" if step else "The model gives that before any update: check its weights"
        )
        raise TrainingError(
            f"supervised training, step {step + 1} of {steps}: {error}. Nothing was saved.\n  {advice}"
        ) from None


def _step(
    model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], rows: list[Row]
) -> tuple[float, float, int, float]:
    """One update. Returns loss, gradient norm, forwarded tokens and seconds."""
    began = time.perf_counter()
    model.zero_grad(set_to_none=True)
    trained = sum(len(row.targets_N) for row in rows)
    loss = 0.0
    for row in rows:
        logprobs_N, _ = row_logprobs(model, row, temperature=1.0, dtype=torch.float32)
        share = -logprobs_N.sum() / trained
        share.backward()
        loss += share.item()
    parameters = list(model.parameters())
    norm = grad_norm(parameters)
    if not (math.isfinite(loss) and math.isfinite(norm.item())):
        raise TrainingError(f"loss {loss}, gradient norm {norm.item()}")
    clip_gradients(parameters, norm, GRAD_CLIP)
    for optimizer in optimizers:
        optimizer.step()
    return loss, norm.item(), sum(len(row.tokens_T) for row in rows), time.perf_counter() - began


def _optimizers(model: PreTrainedModel, kind: str, adam: Optimizer) -> list[torch.optim.Optimizer]:
    if kind == "adamw":
        return [make_adamw(model.parameters(), adam)]
    if kind != "muon":
        raise ValueError(f'`optimizer` ({kind!r}) must be "adamw" or "muon"')
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if is_matrix(name, parameter) else rest).append(parameter)
    muon = torch.optim.Muon(matrices, lr=adam.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, make_adamw(rest, adam)]


def _batches(
    examples: Sequence[Example], batch_tokens: int, random: np.random.Generator
) -> Iterator[list[Tree]]:
    """Endless batches of whole examples, each of at least one and otherwise at most `batch_tokens`."""
    batch: list[Tree] = []
    size = 0
    while True:
        for index in random.permutation(len(examples)):
            prompt, completion = examples[index]
            length = len(prompt) + len(completion)
            if batch and size + length > batch_tokens:
                yield batch
                batch, size = [], 0
            batch.append(Tree(prompt, [Branch(completion, np.ones(len(completion), dtype=bool), 0)]))
            size += length


def _check(examples: Sequence[Example]) -> None:
    if not examples:
        raise DataError("supervised training needs at least one example, got none")
    for index, (prompt, completion) in enumerate(examples):
        if not prompt or not completion:
            raise DataError(
                f"example {index} has {len(prompt)} prompt and {len(completion)} completion tokens"
            )


def _check_tokens(examples: Sequence[Example], vocab: int) -> None:
    for index, (prompt, completion) in enumerate(examples):
        outside = [token for tokens in (prompt, completion) for token in tokens if not 0 <= token < vocab]
        if outside:
            raise DataError(
                f"example {index} has the token id {outside[0]}, and the model embeds ids below {vocab}: "
                "is the tokenizer another model's?"
            )
