"""How long groups and steps take: running means, from which a schedule sees how far ahead to run."""

from __future__ import annotations

MEMORY = 64
"""Observations after which a mean has forgotten most of the earlier ones: lengths drift as a model learns."""


class Mean:
    """Of all observations at first, of about the last `MEMORY` later."""

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, MEMORY)
        self.value += (value - self.value) / self._count


class Durations:
    """In seconds: of groups from their start until they are ready, and of the trainer from one batch until it
    could take the next."""

    def __init__(self) -> None:
        self._group, self._step = Mean(), Mean()

    def group_took(self, seconds: float) -> None:
        self._group.add(seconds)

    def step_took(self, seconds: float) -> None:
        self._step.add(seconds)

    @property
    def group_steps(self) -> float:
        """Steps that a trainer which never waits makes while a group is generated; 1 while unknown."""
        return self._group.value / self._step.value if self._group.value and self._step.value else 1.0
