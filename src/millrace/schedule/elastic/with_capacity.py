"""How many groups are begun ahead of the trainer, by the slots of the present replicas."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from millrace.schedule.view import View


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
