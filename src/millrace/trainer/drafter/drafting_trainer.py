"""The trainer of a policy that trains a drafter beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from millrace.config.schema import Config
from millrace.core.types import Batch, StepResult
from millrace.trainer.adapters.adapted_linear import published_weights
from millrace.trainer.batch.packing import Row
from millrace.trainer.drafter.drafter_training import DrafterTraining
from millrace.trainer.trainer import PolicyTrainer


class DraftingTrainer(PolicyTrainer):
    """A `PolicyTrainer` whose batches also train a drafter. Its policy is that of a `PolicyTrainer`, bit for
    bit: the drafter reads detached states, and has an optimizer of its own. `drafter_seed`: of the first head
    and of the positions that are drawn. Other arguments: as of `PolicyTrainer`."""

    def __init__(self, drafter_seed: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        temperature = self.settings.temperature
        self.drafter = DrafterTraining(self.model, temperature=temperature, seed=drafter_seed)

    def step(self, batch: Batch, *, rejected_dir: Path) -> StepResult:
        """As `BatchStep.step`. The updates for the batch before have ended, and those for this batch begin
        afterwards."""
        self.drafter.finish()
        self.drafter.states.forget()
        result = super().step(batch, rejected_dir=rejected_dir)
        self.drafter.begin(self.version)
        return result

    def _forward(self, row: Row, *, reference: bool = False) -> tuple[torch.Tensor, ...]:
        if reference or not torch.is_grad_enabled():
            return super()._forward(row, reference=reference)
        with self.drafter.states.of(row):
            return super()._forward(row)


def policy_trainer(config: Config, *args: Any, **kwargs: Any) -> PolicyTrainer:
    """The trainer of a run of `config`, with a drafter if `rollout.drafts` says so. Other arguments: as of
    `PolicyTrainer`."""
    if config.rollout.drafts == "trained":
        return DraftingTrainer(config.seed, *args, **kwargs)
    return PolicyTrainer(*args, **kwargs)


def published_tensors(trainer: PolicyTrainer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a version: those of `published_weights`, and the drafter's."""
    weights = published_weights(trainer.model, dtype)
    return weights | trainer.drafter.published if isinstance(trainer, DraftingTrainer) else weights
