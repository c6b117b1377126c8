"""Repack: consolidate the long tail, so that emptied replicas take new weights and start anew.

Laminar, arXiv:2510.12633 (repack algorithm). Replicas that serve the same version and are ramping down
hand all of their trajectories to one another:

    S = {r : C_used(r) < min(C_max, C_prev(r)) and 0 < N(r) < B}

in ascending order of C_used, each source s moves as a whole onto the destination d of S with

    C(d) + C(planned for d) + C(s) <= C_max    and    N(d) + N(planned for d) + N(s) <= B

that has the highest projected KV load (best fit). C is KV use, and C_prev the KV use at the tick before: a
replica whose KV use still grows is ramping up and takes no part. N counts running and waiting trajectories.
B is the roofline decode batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from millrace.schedule.view import RepackOrder, ReplicaView, View


class Repack(Protocol):
    """The decision to move running trajectories between replicas."""

    @property
    def interval_s(self) -> float:
        """Seconds between two calls of `moves`. Another call follows each new version."""

    def moves(self, view: View) -> list[RepackOrder]:
        """Moves to make now. Source and destination serve the same version and are not busy."""

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class BestFit:
    """The published algorithm. `batch_max` (B) None: the slots of the destination."""

    interval_s: float
    kv_fraction_max: float
    batch_max: int | None = None

    def moves(self, view: View) -> list[RepackOrder]:
        return plan(view.replicas, kv_max_tokens_fraction=self.kv_fraction_max, batch_max=self.batch_max)

    def describe(self) -> str:
        return (
            f"every {self.interval_s:g} s and after each update: replicas that ramp down under one version "
            f"are packed up to {self.kv_fraction_max:.0%} of KV"
        )


def plan(
    replicas: Iterable[ReplicaView], *, kv_max_tokens_fraction: float, batch_max: int | None
) -> list[RepackOrder]:
    """Which replicas hand all of their trajectories to which.

    C_max is `kv_max_tokens_fraction` of the replica's own capacity, so replicas may differ in size.
    Guarantees: same version only; both limits include every planned move; no replica is both source and
    destination; busy and ramping-up replicas take no part. Equal loads go by the order of `replicas`.
    """
    by_version: dict[int, list[_Ramping]] = defaultdict(list)
    for replica in replicas:
        candidate = _Ramping.of(replica, kv_max_tokens_fraction, batch_max)
        if candidate.takes_part:
            by_version[replica.version].append(candidate)
    return [move for group in by_version.values() for move in _plan_version(group)]


@dataclass(slots=True)
class _Ramping:
    """A replica with its limits, and its load after the moves planned so far."""

    replica: ReplicaView
    kv_tokens_max: float
    trajectories_max: int
    kv_tokens: int
    trajectories: int
    receives: bool = False
    emptied: bool = False

    @classmethod
    def of(cls, replica: ReplicaView, fraction: float, batch_max: int | None) -> _Ramping:
        return cls(
            replica,
            kv_tokens_max=fraction * replica.kv_capacity_tokens,
            trajectories_max=batch_max or replica.slots,
            kv_tokens=replica.kv_used_tokens,
            trajectories=replica.load,
        )

    @property
    def takes_part(self) -> bool:
        ramps_down = self.kv_tokens < min(self.kv_tokens_max, self.replica.kv_used_tokens_previous)
        return self.replica.serving and ramps_down and 0 < self.trajectories < self.trajectories_max

    def fits(self, source: _Ramping) -> bool:
        return (
            self.kv_tokens + source.kv_tokens <= self.kv_tokens_max
            and self.trajectories + source.trajectories <= self.trajectories_max
        )


def _plan_version(candidates: list[_Ramping]) -> list[RepackOrder]:
    moves = []
    for source in sorted(candidates, key=lambda c: c.kv_tokens):
        if source.receives:
            continue
        fitting = [d for d in candidates if d is not source and not d.emptied and d.fits(source)]
        if not fitting:
            continue
        best = max(fitting, key=lambda d: d.kv_tokens)
        best.kv_tokens += source.kv_tokens
        best.trajectories += source.trajectories
        best.receives, source.emptied = True, True
        moves.append(RepackOrder(source.replica.replica_id, {best.replica.replica_id: source.replica.load}))
    return moves
