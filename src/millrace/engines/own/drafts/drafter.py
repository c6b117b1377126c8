"""A source of draft tokens: its protocol, and whether its drafts pay, by the share of them that was right
lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from millrace.rollout.continuation import Continuation

Tensor = torch.Tensor


class Drafter(Protocol):
    """Guesses the next tokens of running trajectories. A guess may be wrong: the engine verifies each.

    The final hidden state of a token is the state from which the model sampled it: that of the position
    before. So a drafter knows the last token of a row, and the state before the row's last token.

    Attributes:
        wants_hidden  whether the engine keeps hidden states. Without them `hidden` is None everywhere, and
                      rows without a state are drafted for. With them `propose` gets only rows with a state.
    """

    wants_hidden: bool

    def propose(
        self, rows: Sequence[Continuation], most: Sequence[int], hidden: Tensor | None
    ) -> list[list[int]]:
        """For each row at most `most[i]` tokens that may follow `rows[i].tokens`; often none.

        `hidden`: (rows, H), from which the last token of each row was sampled."""

    def note(self, row: Continuation, count: int, draft: Sequence[int], hidden: Tensor | None) -> None:
        """The last `count` tokens of `row` were sampled in one pass, in which `draft` was verified. Called
        while drafts are made. `hidden`: (count, H), from which these were sampled; valid during the call."""

    def finish(self, row: Continuation) -> None:
        """`row` has its last token. Called for every row, also while no drafts are made."""

    def swap(self) -> None:
        """The engine serves other weights from now on, or sleeps. Hidden states were those of the old."""


# ---------------------------------------------------------------- whether drafts pay


PAYS = 0.35
"""A draft token has to be right so often. One more token of a row costs about a fifth of what its own step
would, and preparing a pass costs as much again in a small model."""
WINDOW = 256  # of drafted tokens: what is older counts half, then a quarter
REST = 64
"""So many chances are left out before drafts are tried again."""


class Worth:
    """The running share of right tokens among those that were drafted. At first it is taken to be `right` of
    `drafted`."""

    def __init__(self, right: float = 2.0, drafted: float = 4.0) -> None:
        self._first = self._right, self._drafted = right, drafted
        self._rested = 0

    @property
    def share(self) -> float:
        return self._right / self._drafted

    def note(self, right: int, drafted: int) -> None:
        self._right += right
        self._drafted += drafted
        if self._drafted > WINDOW:
            self._right, self._drafted = self._right / 2, self._drafted / 2

    def tries(self) -> bool:
        """Whether to draft now: the share pays, or drafts have rested and begin anew."""
        if self.share >= PAYS:
            return True
        self._rested = (self._rested + 1) % REST
        if self._rested == 0:
            self._right, self._drafted = self._first
        return self._rested == 0
