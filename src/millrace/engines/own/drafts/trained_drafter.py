"""Drafts of the trained head, from the state that the last token of a row was sampled from.

Shape suffixes: N = rows, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from millrace.devices.draft_head import DraftHead, shapes
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.drafts.drafter import PAYS, Drafter, Worth
from millrace.engines.own.drafts.drafting_engine import DraftingEngine
from millrace.engines.own.parameters import Parameters
from millrace.rollout.continuation import Continuation
from millrace.rollout.protocol import EngineOptions

Tensor = torch.Tensor


class TrainedDrafter:
    """A `Drafter` that takes the most likely token each time, and goes on from its own guess of the state.

    A draft ends before it is less likely than `PAYS` as a whole. `weights`: those that are served.
    `logits`: the projection of the policy, of states (N, H).

    Degenerate: the version has no head, as after a load from a model's files -> no drafts.
    """

    wants_hidden = True

    def __init__(self, weights: Callable[[], Parameters], logits: Callable[[Tensor], Tensor]) -> None:
        self._weights, self._logits = weights, logits
        self._head: DraftHead | None = None
        self._is_there = False

    def propose(
        self, rows: Sequence[Continuation], most: Sequence[int], hidden: Tensor | None
    ) -> list[list[int]]:
        if self._head is None:
            self._head = DraftHead.of(self._weights().named)
            self._is_there = bool(self._head.fuse.any())
        if hidden is None or not self._is_there or max(most) < 1:
            return [[] for _ in rows]
        guesses = self._guesses(rows, max(most), hidden)
        return [row[: max(0, limit)] for row, limit in zip(guesses, most, strict=True)]

    def _guesses(self, rows: Sequence[Continuation], depth: int, states_NH: Tensor) -> list[list[int]]:
        """Of each row the tokens of a draft that is likely enough."""
        assert self._head is not None
        embedding, device = self._weights().embedding, states_NH.device
        tokens_N = torch.tensor([row.tokens[-1] for row in rows], device=device)
        colder_N = torch.tensor([1 / (row.work.sampling.temperature or 1e-3) for row in rows], device=device)
        chances_N = torch.ones(len(rows), device=device)
        guesses: list[list[int]] = [[] for _ in rows]
        for _ in range(depth):
            states_NH = self._head(states_NH, F.embedding(tokens_N, embedding))
            probs_NV = (self._logits(states_NH) * colder_N[:, None]).softmax(-1)
            best_N, tokens_N = probs_NV.max(-1)
            chances_N = chances_N * best_N
            likely = False
            for row, token, chance in zip(guesses, *torch.stack([tokens_N, chances_N]).tolist(), strict=True):
                if chance >= PAYS:
                    row.append(int(token))
                    likely = True
            if not likely:
                break
        return guesses

    def note(self, row: Continuation, count: int, draft: Sequence[int], hidden: Tensor | None) -> None:
        """Nothing: the trainer learns."""

    def finish(self, row: Continuation) -> None:
        """Nothing is kept of a row."""

    def swap(self) -> None:
        self._head = None


FIRST = 8  # steps with and without drafts that are measured before they are compared
WINDOW = 64  # steps: what is older counts half, then a quarter
EVERY, TRIAL = 256, 4
"""Of so many steps so many are of the kind that is slower now, to measure it again."""


@dataclass
class _Pace:
    """Of steps of one kind."""

    seconds: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        self.seconds, self.tokens, self.steps = self.seconds + seconds, self.tokens + tokens, self.steps + 1
        if self.steps > WINDOW:
            self.seconds, self.tokens, self.steps = self.seconds / 2, self.tokens / 2, self.steps / 2

    @property
    def token_s(self) -> float:
        return self.seconds / max(self.tokens, 1.0)


class MeasuredWorth(Worth):
    """A `Worth` that compares the seconds per token of steps with and without drafts as well. The time of a
    step depends on its rows, so each number of rows, in powers of 2, is measured apart.

    rows   of the step to come; the engine sets it
    tried  the step had time for drafts, whether or not there were any
    """

    rows, tried = 1, False

    def __init__(self, right: float = 8.0, drafted: float = 16.0) -> None:
        super().__init__(right, drafted)
        self._paces: dict[int, tuple[_Pace, _Pace]] = {}  # without and with drafts
        self._steps: dict[int, int] = {}

    def tries(self) -> bool:
        self.tried = self.is_faster() and super().tries()
        return self.tried

    def is_faster(self) -> bool:
        """Whether the step to come should have drafts, as far as seconds say."""
        without, drafting = self._of_rows()
        if min(without.steps, drafting.steps) < FIRST:
            return without.steps >= FIRST
        trial = self._steps[self.rows.bit_length()] % EVERY < TRIAL
        return (drafting.token_s < without.token_s) != trial

    def measured(self, tokens: int, seconds: float) -> None:
        """A step of `rows` rows has sampled `tokens`."""
        self._of_rows()[self.tried].note(tokens, seconds)
        self._steps[self.rows.bit_length()] = self._steps.get(self.rows.bit_length(), 0) + 1

    def _of_rows(self) -> tuple[_Pace, _Pace]:
        return self._paces.setdefault(self.rows.bit_length(), (_Pace(), _Pace()))


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
