"""Whether drafts pay, by the share of them that was right lately."""

from __future__ import annotations

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
