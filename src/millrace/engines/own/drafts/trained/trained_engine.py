"""The engine that drafts with the trained head."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from millrace.drafter.draft_head import shapes
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.drafts.drafter import Drafter
from millrace.engines.own.drafts.drafting_engine import DraftingEngine
from millrace.engines.own.drafts.trained.measured_worth import MeasuredWorth
from millrace.engines.own.drafts.trained.trained_drafter import TrainedDrafter
from millrace.rollout.protocol import EngineOptions


class TrainedDraftingEngine(DraftingEngine):
    """A `DraftingEngine` whose versions have the head's tensors behind the model's. The head is pulled,
    digested and swapped with them. Drafts are made while they are measured to be faster. Arguments: as of
    `DraftingEngine`."""

    def __init__(self, architecture: Architecture, options: EngineOptions, **kwargs: Any) -> None:
        (hidden_size,) = architecture.shapes["model.norm.weight"]
        with_head = replace(architecture, shapes=architecture.shapes | shapes(hidden_size))
        super().__init__(with_head, options, **kwargs)
        self._worth: MeasuredWorth = MeasuredWorth()

    def _opened_drafter(self) -> Drafter:
        return TrainedDrafter(lambda: self._active, self._logits_of)

    def _logits_of(self, states: torch.Tensor) -> torch.Tensor:
        padded = states.new_zeros(self._forward.matmul.rows(len(states)), states.shape[1])
        padded[: len(states)] = states
        return self._forward.logits(self._active, padded, len(states))

    def _decode(self) -> None:
        rows, tokens, began_s = len(self._running), self._generated, time.perf_counter()
        self._worth.rows, self._worth.tried = rows, False
        super()._decode()
        if rows <= self._rows_max and self._generated > tokens:
            self._worth.measured(self._generated - tokens, time.perf_counter() - began_s)

    def _lacks_states(self) -> bool:
        return self._worth.tried and super()._lacks_states()
