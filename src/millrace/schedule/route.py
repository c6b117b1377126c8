"""Route: on which replica does an admitted group start?

A group starts whole on one replica: its members share the prefill of their prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.schedule.view import ReplicaView, View


class Route(Protocol):
    """The decision where. Lower ranks go first, equal ranks in the order of the replicas."""

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        """How wanted `replica` is for the next group; None: not at all.

        `load` counts its trajectories with those of groups routed in this same decision. Replicas
        that are about to serve (`busy`) are asked about as they will be after the pull. To
        give one a rank is to keep its share for it: the group waits there until the pull is done.
        """

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The replica with the lowest load per slot, counting those that are just taking new weights.

    Without their share kept for them, the first replica to finish its pull would get the whole batch.
    """

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        return load / replica.slots

    def describe(self) -> str:
        return "least loaded replica; one that is taking new weights keeps its share"


@dataclass(frozen=True, slots=True)
class NewestOnly:
    """RLBoost (arXiv:2510.19225): the least loaded of the replicas that serve the newest weights, or are just
    taking them. The others only end what they have begun, and then they are empty and take them too."""

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
