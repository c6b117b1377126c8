"""The gradient of trajectories that are cut into rows with shared prefixes, for `turns.py`."""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from common import say, sized
from engine import make_model

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.model import load_model
from millrace.trainer.trainer import PolicyTrainer

GROUPS, GROUP_SIZE, TURNS, TOKENS = sized((4, 8, 6, 24), (2, 4, 4, 6))
MODEL = sized((256, 4), (64, 1))  # hidden size, layers
VOCAB = 512
KINDS = "grpo", "gspo", "dapo", "dr_grpo"


def trajectories(*, forks: bool) -> Batch:
    """`forks`: every answer begins a sequence, which goes on with all that precedes it."""
    random, groups = np.random.default_rng(0), []
    for group_id in range(GROUPS):
        members = []
        for member in range(GROUP_SIZE):
            columns = TokenColumns()
            for turn in range(TURNS):
                if turn and forks:
                    columns.fork(len(columns), 0)
                if turn:
                    columns.observe(random.integers(VOCAB, size=TOKENS).tolist())
                sampled = random.integers(VOCAB, size=TOKENS).tolist()
                columns.extend(TokenColumns.of(sampled, random.uniform(-7, -5, TOKENS).tolist(), 0))
            identity = group_id * GROUP_SIZE + member
            mask, reward = columns.sampled(), float(random.integers(2))
            members.append(TrainSequence(identity, columns, reward, truncated=False, mask=mask))
        groups.append(TrainGroup(group_id, token_array(range(8)), members))
    return Batch(0, groups)


def gradient(directory: str, kind: str, batch: Batch, token_budget: int) -> torch.Tensor:
    """Of all weights, as one vector."""
    settings = StepSettings(
        Optimizer(), token_budget, TURNS * TOKENS, 1.0, dtype=torch.float32, published=torch.float32
    )
    model = load_model(directory, torch.device("cpu"))
    trainer = PolicyTrainer(model, build(PolicyGradient(kind=kind)), settings)
    trainer.accumulate(batch)
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def split() -> dict[str, float]:
    """The largest difference over algorithms and sizes of rows, relative to the gradient's norm."""
    errors = []
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, *MODEL)
        for kind in KINDS:
            one = gradient(directory, kind, trajectories(forks=False), 2**20)
            for budget in (2**20, TURNS * TOKENS):
                several = gradient(directory, kind, trajectories(forks=True), budget)
                errors.append(((several - one).norm() / one.norm()).item())
                say(f"{kind}, rows of {budget} tokens: {errors[-1]:.2g}")
    return {"row_split_error": max(errors)}
