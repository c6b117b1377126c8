"""What a run measures of itself: running means, from which a schedule sees how far ahead to run."""

from __future__ import annotations

MEMORY = 64
"""Durations after which a mean has forgotten most of the earlier ones: lengths drift as a model learns."""

BATCHES = 16
"""The same for the staleness of batches: it follows what the schedule decides."""


FILLING = 8
"""The first batches of a run, or after a resume, are young whatever the schedule does: they do not count."""


class Mean:
    """Of all observations at first, of about the last `memory` later."""

    __slots__ = ("_count", "_memory", "value")

    def __init__(self, memory: int = MEMORY) -> None:
        self.value: float | None = None
        self._count, self._memory = 0, memory

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, self._memory)
        before = self.value or 0.0
        self.value = before + (value - before) / self._count


class RunAverages:
    """Seconds of groups from their start until they are ready, and of the trainer from one batch until it
    could take the next; the staleness of trained tokens, in versions."""

    def __init__(self) -> None:
        self._group, self._step, self._staleness = Mean(), Mean(), Mean(BATCHES)
        self._batches = 0

    def group_took(self, seconds: float) -> None:
        self._group.add(seconds)

    def step_took(self, seconds: float) -> None:
        self._step.add(seconds)

    def batch_trained(self, staleness: float) -> None:
        self._batches += 1
        if self._batches > FILLING:
            self._staleness.add(staleness)

    @property
    def group_steps(self) -> float:
        """Steps that a trainer which never waits makes while a group is generated; 1 while unknown."""
        return self._group.value / self._step.value if self._group.value and self._step.value else 1.0

    @property
    def staleness(self) -> float | None:
        """None: too little was trained."""
        return self._staleness.value
