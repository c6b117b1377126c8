"""`examples/minimal.py` is the specification: the framework computes the same, faster and at scale."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.long import few

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.model import load_model
from millrace.trainer.trainer import PolicyTrainer

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUPS, LENGTH, TEMPERATURE = 3, 7, 0.8
# Adam divides a gradient by its own size, which turns the rounding of a gradient near zero into a
# visible difference of weights. An eps well above rounding takes that away.
EPS = 1e-5


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(minimal, seed):
    """Prompts, tokens, stale behavior log-probs, lengths and rewards of a batch."""
    random = np.random.default_rng(seed)
    size = GROUPS * minimal.GROUP_SIZE
    prompts = random.integers(0, minimal.DIGITS, (GROUPS, 4)).repeat(minimal.GROUP_SIZE, axis=0)
    tokens = random.integers(0, minimal.DIGITS, (size, LENGTH))
    lengths = random.integers(1, LENGTH + 1, size)
    return prompts, tokens, random.uniform(-5, -1, (size, LENGTH)), lengths, random.integers(0, 2, size)


def minimal_update(minimal, model, optimizer, kind, batch):
    prompts, tokens, logprobs, lengths, rewards = map(torch.from_numpy, batch)
    mask = torch.arange(LENGTH) < lengths[:, None]
    return minimal.update(
        model,
        optimizer,
        kind,
        prompts,
        tokens,
        logprobs.float(),
        mask,
        rewards.float(),
        temperature=TEMPERATURE,
    )


def framework_batch(minimal, version, batch):
    groups = []
    for first in range(0, len(batch[0]), minimal.GROUP_SIZE):
        sequences = []
        for i in range(first, first + minimal.GROUP_SIZE):
            _, tokens, logprobs, lengths, rewards = (values[i] for values in batch)
            kept = slice(0, int(lengths))
            sequences.append(
                TrainSequence(
                    trajectory_id=i,
                    columns=TokenColumns.of(tokens[kept].tolist(), logprobs[kept].tolist(), version),
                    reward=float(rewards),
                    truncated=False,
                )
            )
        groups.append(TrainGroup(first, batch[0][first].tolist(), sequences))
    return Batch(version, groups)


@pytest.mark.parametrize(
    ("kind", "config"), [("grpo", PolicyGradient()), ("aipo", PolicyGradient(kind="aipo"))]
)
@pytest.mark.parametrize("token_budget", [4096, 48])
def test_minimal_and_the_framework_give_the_same_losses_and_weights(kind, config, token_budget, tmp_path):
    minimal = example("minimal")
    plain = minimal.make_model()
    plain.save_pretrained(tmp_path / "model")
    adam = minimal.make_optimizer(plain, lr=1e-3, eps=EPS)
    settings = StepSettings(
        optimizer=Optimizer(lr=1e-3, eps=EPS),
        token_budget=token_budget,
        max_tokens=LENGTH,
        temperature=TEMPERATURE,
        dtype=torch.float32,
        published=torch.float32,
    )
    model = load_model(tmp_path / "model", torch.device("cpu"))
    trainer = PolicyTrainer(model, build(config), settings)
    for version in range(3):
        batch = drawn(minimal, version)
        expected = minimal_update(minimal, plain, adam, kind, batch)
        result = trainer.step(framework_batch(minimal, version, batch), rejected_dir=tmp_path)
        assert result.metrics["loss"] == pytest.approx(expected, abs=1e-6)
        for one, other in zip(plain.parameters(), trainer.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", few(["grpo", "aipo"]))
def test_minimal_learns(kind):
    history = example("minimal").train(kind, steps=80)
    assert np.mean(history[-10:]) > np.mean(history[:10]) + 0.4


def test_an_algorithm_of_your_own_learns():
    found = example("algorithm").main()
    assert found[-1] > 2 * found[0]
