"""Admit: how many groups may start on a replica now? Screen: does the rest of a group start, once its first
trajectories have rewards?

`Schedule` itself respects the staleness bound and the end of the run, for every rule. A rule only says how
many groups one replica can use. Its replica is as it is now, or as it will be after a pull.

**Screen.** A group starts with its first n trajectories. If their rewards are all equal, the rest would most
likely get the same reward, and a group of equal rewards teaches nothing. So the rest never starts.

Source: SPEED-RL, arXiv:2506.09016. There and here a group is trained with its first trajectories too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.core.errors import DataError
from millrace.core.rounding import all_equal
from millrace.schedule.deadlines import NO_LIMIT
from millrace.schedule.view import ReplicaView, View

QUEUE_ROUNDS = 2
"""A replica of an asynchronous schedule holds at most this many times its slots."""


class Admit(Protocol):
    """The decision to start groups."""

    def room(self, view: View, replica: ReplicaView) -> int:
        """New groups that `replica` has use for now, 0 or more."""

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class WithinBound:
    """All that the staleness bound allows, in a queue of at most `rounds_max` times a replica's slots.

    The short queue keeps a replica busy and binds groups late: to a free replica, at younger weights.
    None: no queue limit, so that a whole batch starts at once.
    """

    rounds_max: int | None = None

    def room(self, view: View, replica: ReplicaView) -> int:
        if self.rounds_max is None:
            return NO_LIMIT
        return _groups_to_fill(self.rounds_max * replica.slots - replica.load, view.start_size)

    def describe(self) -> str:
        queue = "" if self.rounds_max is None else f", at most {self.rounds_max} x slots on a replica"
        return f"while every live group can be trained within the staleness bound{queue}"


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Laminar: a replica starts a round of groups under one version, as its KV cache has room.

    Slots: another group starts while one of the `batch_max` slots (None: all) is free; members without a free
    slot wait in the replica. KV: a running trajectory counts with its present tokens. A waiting trajectory,
    and each member of the new group, counts with the most that it may need. An idle replica may always start
    one group. Rounds: `round_groups` groups; None: the replica's share of a batch. The next round begins when
    the replica is empty and serves the newest weights.

    Source: Laminar, arXiv:2510.12633 (trajectory-level generation). There the round is the engine's maximum
    batch. Here it is a share of the trainer's batch by default: otherwise a few replicas of a small machine
    would run far ahead of the trainer.
    """

    round_groups: int | None = None
    batch_max: int | None = None

    def room(self, view: View, replica: ReplicaView) -> int:
        slots = self.batch_max or replica.slots
        by_slots = _groups_to_fill(slots - replica.load, view.start_size)
        return min(self._round_room(view, replica), by_slots, _groups_in_kv(view, replica))

    def _round_room(self, view: View, replica: ReplicaView) -> int:
        round_groups = self.round_groups or -(-view.batch_groups // view.fleet)
        started = replica.groups_since_swap % round_groups
        if started:
            return round_groups - started
        begins = replica.groups_since_swap == 0 or replica.load == 0
        return round_groups if begins and not view.behind(replica) else 0

    def describe(self) -> str:
        size = "its share of a batch" if self.round_groups is None else f"{self.round_groups} groups"
        return f"while the replica has KV room, in rounds of {size} under one version"


@dataclass(frozen=True, slots=True)
class WhileNewest:
    """A replica that serves the newest weights starts as many groups as fill its slots, again and again,
    while its KV cache has room (counted as in `KVRoom`). At least half a group waits in the replica, so that
    a free slot is filled at once and not after the next decision.

    Laminar starts a round and lets the replica run empty. Here the replica goes on until newer weights exist,
    and runs empty only then. So decode batches stay full, and no group starts under weights that are old.
    """

    def room(self, view: View, replica: ReplicaView) -> int:
        wanted = replica.slots + view.start_size // 2
        by_slots = _groups_to_fill(wanted - replica.load, view.start_size)
        if not by_slots or view.behind(replica):
            return 0
        return min(by_slots, _groups_in_kv(view, replica))

    def describe(self) -> str:
        return "while the replica serves the newest weights and has free slots and KV room"


def _groups_in_kv(view: View, replica: ReplicaView) -> int:
    """New groups that have KV room, counted as `KVRoom` says. An idle replica has room for one group."""
    promised = replica.kv_used_tokens + replica.waiting * view.max_sequence_tokens
    group_tokens = view.start_size * view.max_sequence_tokens
    groups = max(0, replica.kv_capacity_tokens - promised) // group_tokens
    return max(1, groups) if replica.load == 0 else groups


def _groups_to_fill(free_slots: int, group_size: int) -> int:
    """The number of groups that fill `free_slots`."""
    return max(0, -(-free_slots // group_size))


# ---------------------------------------------------------------- screen


SCREENED_MAX = 1000  # groups in a row that are screened out, until the run ends


def screened_reward(rewards: Sequence[float]) -> float | None:
    """The reward for which a group is screened out; None: its rest starts.

    `rewards` of those first trajectories that have one: a failure is not 0. One reward alone says nothing.
    """
    return rewards[0] if len(rewards) > 1 and all_equal(rewards) else None


def refuse_endless(in_a_row: int, row_id: str, why: str) -> None:
    """Raises: DataError: so many groups in a row were screened out, the last of `row_id`, that no end is in
    sight."""
    if in_a_row >= SCREENED_MAX:
        raise DataError(
            f"{in_a_row} groups in a row were screened out; the last, {row_id}: {why}\n"
            "  The task is learned, or too hard. To go on all the same, set `batch.screen_samples` to 0."
        )
