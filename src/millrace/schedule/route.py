"""Route: on which replica does an admitted group start?

All members of a group start on one replica: they share the prefill of their prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.schedule.view import ReplicaView, View


class Route(Protocol):
    """The choice of a replica. Lower ranks go first, equal ranks in the order of the replicas."""

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        """The rank of `replica` for the next group; None: the group may not start there.

        `load` counts the trajectories of `replica`, with the groups that this decision has routed to it. A
        busy replica is as it will be after its pull. A busy replica with a rank reserves places of the bound
        for its time after the pull. No group is admitted there yet.
        """

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The replica with the lowest load per slot, counting those that are just taking new weights.

    Without a share for the pulling replicas, the first replica to finish its pull would get the whole batch.
    """

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        return load / replica.slots

    def describe(self) -> str:
        return "least loaded replica; one that is taking new weights keeps its share"


@dataclass(frozen=True, slots=True)
class NewestOnly:
    """RLBoost (arXiv:2510.19225): the least loaded of the replicas that serve the newest weights, or are just
    taking them. The other replicas finish their trajectories. Then they are empty and take new weights
    too."""

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        return None if replica.version < view.newest else load / replica.slots

    def describe(self) -> str:
        return "least loaded replica of those that serve the newest weights or are taking them"


@dataclass(frozen=True, slots=True)
class Local:
    """Laminar: each serving replica starts its own groups and waits for no other; emptiest first."""

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        return None if replica.busy else load / replica.slots

    def describe(self) -> str:
        return "each replica starts its own groups, emptiest first"
