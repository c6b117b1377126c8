"""Drafts of the trained head, from the state that the last token of a row was sampled from.

Shape suffixes: N = rows, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from millrace.drafter.draft_head import DraftHead
from millrace.engines.own.drafts.worth import PAYS
from millrace.engines.own.parameters import Parameters
from millrace.rollout.continuation import Continuation

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
