"""Which trainer trains, if a run has two. Pure."""

from __future__ import annotations


class TrainerTurn:
    """One trainer at a time has the turn, from its first command until its death is known. A trainer whose
    error ends the run keeps it, so that no other trainer goes on meanwhile."""

    def __init__(self) -> None:
        self.holder: str | None = None

    def take(self, name: str) -> bool:
        """Whether trainer `name` has the turn now. It gets the turn if nobody has it."""
        self.holder = self.holder or name
        return self.holder == name

    def give_back(self, name: str) -> None:
        """Trainer `name` is dead. Nothing happens if another trainer has the turn."""
        if self.holder == name:
            self.holder = None
