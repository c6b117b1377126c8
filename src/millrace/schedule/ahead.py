"""Ahead: how many batches does generation run ahead of the trainer?

The staleness bound is what is allowed, this is what is wanted: enough groups under way that the trainer finds
a batch when it is free, and not more, since each further one only waits and grows old.

By Little's law a trainer that takes B groups a step needs B D / T groups under way, where a group takes D
seconds until it is ready and a step T. So D / T batches are enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, inf

from millrace.schedule.view import View

RESERVE = 2.0
"""Groups end out of order: so many times the batches of Little's law keep the trainer busy."""

AHEAD_MAX = 16
"""Batches at most where there is no bound."""

YOUNGER = 0.02
"""Data that is younger than was wanted by more than this share lets admission go on."""

GAIN = 4.0
"""Batches for each further version by which data is younger than was wanted."""


@dataclass(frozen=True, slots=True)
class WithCapacity:
    """As many batches ahead as the replicas that are there hold, within the staleness bound: what their slots
    decode at once, `rounds` times over.

    So more is begun at once when replicas join. When they are taken away no more is begun than the rest can
    generate, and what is begun does not grow old in a queue.
    """

    staleness_max: int | None
    rounds: int

    def groups_max(self, view: View) -> int:
        """Live groups at most, without those in training. Without replicas a batch."""
        lead = view.version - view.newest
        slots = sum(replica.slots for replica in view.replicas)
        held = self.rounds * slots / (view.group_size * view.batch_groups)
        limit = inf if self.staleness_max is None else self.staleness_max
        return ceil(view.batch_groups * (min(held, limit) + 1 - lead))

    def describe(self) -> str:
        return f"a batch, and {self.rounds} x the slots of the replicas that are there"


@dataclass(frozen=True, slots=True)
class Ahead:
    """`batches` None: as many as measured durations need. Within

    - at least one, else the trainer waits for each batch from its start;
    - at most the middle between 1 and the staleness bound. The other half is for stragglers: without it the
      trainer waits for the longest group of every batch, and all groups are as old as the bound;
    - in whole shares of a replica, 1 / replicas of a batch. A replica takes newer weights only when it is
      empty, so what it starts it starts together.

    Where generation is the slower side, groups are trained younger than that: they do not wait for the
    trainer. But ready groups that wait for an earlier one of the stream leave slots empty. So admission goes
    on, within the bound, until the data is as old as was wanted.
    """

    staleness_max: int | None
    batches: float | None = None

    def groups_max(self, view: View) -> int:
        """Live groups at most, without those in training. The last of so many would be trained that many
        versions after the newest weights, if all were ready in time."""
        lead = view.version - view.newest
        return ceil(view.batch_groups * (self._batches(view) + 1 - lead))

    def _batches(self, view: View) -> float:
        limit = inf if self.staleness_max is None else self.staleness_max
        if self.batches is not None:
            return min(self.batches, limit)
        replicas = max(1, len(view.replicas))
        enough = min(RESERVE * view.group_steps, (limit + 1) / 2, AHEAD_MAX)
        wanted = max(1.0, floor(enough * replicas) / replicas)
        younger = 0.0 if view.staleness is None else (1 - YOUNGER) * wanted - view.staleness
        return min(wanted + GAIN * max(0.0, younger), limit, max(AHEAD_MAX, wanted))

    def describe(self) -> str:
        if self.batches is not None:
            return f"{self.batches:g} batches ahead of the trainer"
        return "as many batches ahead of the trainer as it trains while a group is generated"
