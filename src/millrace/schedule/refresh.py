"""Refresh: when does a replica take newer weights?

A rule decides only for replicas that are not busy and serve an older version than the newest one of their
host. First pulls and the recovery of lost trajectories are the same for all rules: see `Schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.schedule.view import ReplicaView, View


class Refresh(Protocol):
    """The decision to go to the newest version."""

    @property
    def discards(self) -> bool:
        """Whether trajectories in flight restart from their prompts. If not, they go on under new weights."""

    def due(self, view: View, replica: ReplicaView) -> bool:
        """Whether `replica` takes `view.newest_for(replica)` now."""

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class WhenEmpty:
    """When nothing is in flight on the replica: one version per trajectory, nothing thrown away.

    Under a staleness bound of 0 this is the synchronous barrier; in Laminar (arXiv:2510.12633) a replica
    is empty at the end of its batch, or because a repack moved its stragglers away.
    """

    discards = False

    def due(self, view: View, replica: ReplicaView) -> bool:
        return replica.load == 0

    def describe(self) -> str:
        return "when the replica is empty"


@dataclass(frozen=True, slots=True)
class BetweenIterations:
    """LlamaRL (arXiv:2505.24034): between iterations of `iteration_tokens` decode steps (partial rollout).

    Trajectories in flight at the end of an iteration go on under the new weights in the next one. The
    paper cuts iterations at a token budget per response; here an iteration is that many decode steps of
    the replica since its last swap, so that one command covers all of its trajectories.
    """

    iteration_tokens: int
    discards = False

    def due(self, view: View, replica: ReplicaView) -> bool:
        return replica.load == 0 or replica.steps_since_swap >= self.iteration_tokens

    def describe(self) -> str:
        return f"when empty, or after {self.iteration_tokens} decode steps, with trajectories in flight"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """AReaL (arXiv:2505.24298): as soon as newer weights exist, in the middle of trajectories.

    Trajectories go on under the new weights with their KV recomputed, so their tokens have several versions.
    """

    discards = False

    def due(self, view: View, replica: ReplicaView) -> bool:
        return True

    def describe(self) -> str:
        return "at once, in the middle of trajectories"


@dataclass(frozen=True, slots=True)
class BeyondReload:
    """RLAX (arXiv:2512.06392): when further behind than `reload_staleness`; partial rollouts are discarded.

    An empty replica takes newer weights at once: this costs nothing.
    """

    reload_staleness: int
    discards = True

    def due(self, view: View, replica: ReplicaView) -> bool:
        return replica.load == 0 or view.newest_for(replica) - replica.version > self.reload_staleness

    def describe(self) -> str:
        return f"when empty, or more than {self.reload_staleness} versions behind, discarding partials"
