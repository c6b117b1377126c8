"""A run's measurements of itself: running means, from which a schedule derives how far ahead to run."""

from __future__ import annotations

from millrace.schedule.tail.lengths import PastLengths

MEMORY = 64
"""Durations that make up most of a mean. Lengths drift as a model learns, so older durations fade."""

BATCHES = 16
"""The same for the staleness of batches, which follows the schedule's decisions."""

FILLING = 8
"""The first batches of a run, or after a resume, are young under any schedule. They do not count."""


class Mean:
    """The mean of all observations at first, and later of about the last `memory`."""

    __slots__ = ("_count", "_memory", "value")

    def __init__(self, memory: int = MEMORY) -> None:
        self.value: float | None = None
        self._count, self._memory = 0, memory

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, self._memory)
        mean = self.value or 0.0
        self.value = mean + (value - mean) / self._count


class RunAverages:
    """`group`: seconds of a group from its start until it is ready. `step`: seconds of the trainer from one
    batch until it could take the next. The staleness of trained tokens, in versions. `lengths`: of rows."""

    def __init__(self) -> None:
        self.group, self.step, self._staleness = Mean(), Mean(), Mean(BATCHES)
        self.lengths, self._batches = PastLengths(), 0

    def batch_trained(self, staleness: float) -> None:
        self._batches += 1
        if self._batches > FILLING:
            self._staleness.add(staleness)

    @property
    def group_duration_batches(self) -> float:
        """Batches that a trainer without waits trains while one group is generated; 1 while unknown."""
        return self.group.value / self.step.value if self.group.value and self.step.value else 1.0

    @property
    def staleness(self) -> float | None:
        """None: too few batches were trained."""
        return self._staleness.value
