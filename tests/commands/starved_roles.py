"""Roles that may not have the memory that their work needs: torch's own allocator refuses."""

from __future__ import annotations

import resource
from typing import Any

import torch

from millrace.core.types import Batch, StepResult
from millrace.rewards.limits import limit_process_memory
from millrace.rollout.replica import EngineReplica
from millrace.trainer.role import TorchTrainer

ALLOWED_MB, NEEDED_BYTES = 64, 1 << 30


def _ask_for_too_much() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit_process_memory(ALLOWED_MB)
    try:
        torch.zeros(NEEDED_BYTES, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


class StarvedTrainer(TorchTrainer):
    """Cannot make the step from version 2."""

    def _step(self, batch: Batch) -> StepResult:
        if batch.version == 2:
            _ask_for_too_much()
        return super()._step(batch)


class StarvedReplica(EngineReplica):
    """Cannot decode for more than a few trajectories."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        step = self._engine.step

        def starved_step() -> None:
            if self._engine.load().waiting:
                _ask_for_too_much()
            step()

        self._engine.step = starved_step  # type: ignore[method-assign]
