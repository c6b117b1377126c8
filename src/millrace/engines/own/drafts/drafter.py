"""The protocol of a source of draft tokens."""

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
