from __future__ import annotations

import math

import msgspec
import pytest
import torch
from trainer_doubles import make_batch, make_trainer, weights_of

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch
from millrace.trainer.worker import not_finite_trajectories

POISON = -1000.0


class Poisoned:
    """GRPO, in which a token whose behavior log-prob is POISON breaks the loss, or the gradient alone."""

    def __init__(self, algorithm, broken):
        self._algorithm, self._broken = algorithm, broken

    def __getattr__(self, name):
        return getattr(self._algorithm, name)

    def objective(self, xp, logprobs, advantages_N):
        loss_N = self._algorithm.objective(xp, logprobs, advantages_N)
        poison_N = torch.where(logprobs.behavior_N <= POISON, math.inf, 0.0)
        if self._broken == "loss":
            return loss_N + poison_N
        logprobs.current_N.register_hook(lambda gradient_N: gradient_N + poison_N)
        return loss_N


def poisoned(batch, *ids):
    groups = []
    for group in batch.groups:
        sequences = [
            msgspec.structs.replace(
                s, columns=TokenColumns.of(s.columns.tokens, [POISON] * len(s.columns), 0), mask=None
            )
            if s.trajectory_id in ids
            else s
            for s in group.sequences
        ]
        groups.append(msgspec.structs.replace(group, sequences=sequences))
    return Batch(batch.version, groups)


def trainer_breaking(broken):
    trainer = make_trainer()
    trainer.algorithm = Poisoned(trainer.algorithm, broken)
    return trainer


@pytest.mark.parametrize("broken", ["loss", "gradient"])
@pytest.mark.parametrize("ids", [(5,), (0, 3, 11)])
def test_the_trajectories_that_fail_alone_are_named(broken, ids):
    trainer, before = trainer_breaking(broken), weights_of(make_trainer())
    batch = poisoned(make_batch(), *ids)
    assert not_finite_trajectories(trainer, batch) == list(ids)
    assert not_finite_trajectories(trainer, batch) == list(ids)
    for one, other in zip(before, weights_of(trainer), strict=True):
        assert torch.equal(one, other)
    assert all(not parameter.grad.any() for parameter in trainer.model.parameters())


def test_where_every_trajectory_can_be_trained_on_alone_all_are_named():
    assert not_finite_trajectories(make_trainer(), make_batch()) == list(range(12))
