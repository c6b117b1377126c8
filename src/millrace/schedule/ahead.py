"""Ahead: how many batches does generation run ahead of the trainer?

The staleness bound says how far ahead generation may run. This decision says how far it should run: far
enough that a free trainer finds a batch. Every group beyond that only waits and grows old.

By Little's law a trainer that takes B groups every T seconds needs B D / T groups under way, if a group takes
D seconds until it is ready. So D / T batches are enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, inf

from millrace.schedule.view import View

RESERVE = 2.0
"""Groups end out of order, so the trainer needs this multiple of the batches of Little's law."""

AHEAD_MAX = 16
"""Batches at most, if there is no bound."""

YOUNGER = 0.02
"""Admission goes on while the data is younger than wanted by more than this share."""

GAIN = 4.0
"""Additional batches for each version by which the data is younger than wanted."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """`batches` None: as many as measured durations need, with these limits:

    - at least one batch, or else the trainer waits for each batch from its start;
    - at most the middle between 1 and the staleness bound. The other half is for stragglers: without it the
      trainer waits for the longest group of every batch, and all groups are as old as the bound;
    - a multiple of one replica's share, which is 1 / replicas of a batch. A replica takes newer weights only
      when it is empty, so it starts its whole share together.

    If generation is slower than training, groups do not wait for the trainer, and they are trained younger
    than wanted. But ready groups that wait for an earlier group of the stream leave slots empty. So admission
    goes on, within the bound, until the data is as old as wanted.
    """

    staleness_max: int | None
    batches: float | None = None

    def wanted_groups_max(self, view: View) -> int:
        """Live groups at most, without those in training. If all were ready in time, the last of them would
        be trained `_batches` versions after the newest weights. Redundant groups come on top."""
        lead = view.version - view.newest
        return ceil(view.batch_groups * (self._batches(view) + 1 - lead)) + view.redundant_groups

    def _batches(self, view: View) -> float:
        limit = inf if self.staleness_max is None else self.staleness_max
        if self.batches is not None:
            return min(self.batches, limit)
        replicas = max(1, len(view.replicas))
        enough = min(RESERVE * view.group_duration_batches, (limit + 1) / 2, AHEAD_MAX)
        wanted = max(1.0, floor(enough * replicas) / replicas)
        younger = 0.0 if view.staleness is None else (1 - YOUNGER) * wanted - view.staleness
        return min(wanted + GAIN * max(0.0, younger), limit, max(AHEAD_MAX, wanted))

    def describe(self) -> str:
        if self.batches is not None:
            return f"{self.batches:g} batches ahead of the trainer"
        return "as many batches ahead of the trainer as it trains while a group is generated"


@dataclass(frozen=True, slots=True)
class WithCapacity:
    """As many groups ahead as fill the slots of the present replicas `rounds` times, within the staleness
    bound.

    So more groups start at once when replicas join. When replicas leave, no more groups start than the other
    replicas can generate, and groups do not grow old in a queue.
    """

    staleness_max: int | None
    rounds: int

    def wanted_groups_max(self, view: View) -> int:
        """Live groups at most, without those in training. Without replicas one batch."""
        lead = view.version - view.newest
        slots = sum(replica.slots for replica in view.replicas)
        batches = self.rounds * slots / (view.group_size * view.batch_groups)
        limit = inf if self.staleness_max is None else self.staleness_max
        return ceil(view.batch_groups * (min(batches, limit) + 1 - lead))

    def describe(self) -> str:
        return f"a batch, and {self.rounds} x the slots of the replicas that are there"


def long_round(view: View) -> bool:
    """Whether parked groups start now, in place of new ones: those that are parked or have begun again make
    a batch, and no other group is live."""
    alone = view.returned == len(view.groups)
    return alone and view.parked + view.returned >= view.batch_groups


@dataclass(frozen=True, slots=True)
class TailRounds:
    """A batch in a long round, and `redundant` more groups in a short one."""

    redundant: int

    def wanted_groups_max(self, view: View) -> int:
        """Live groups at most."""
        return view.batch_groups + (0 if long_round(view) else self.redundant)

    def describe(self) -> str:
        return f"{self.redundant} groups beyond a batch, and none in a long round of those left behind"
