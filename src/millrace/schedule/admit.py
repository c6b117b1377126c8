"""Admit: how many groups may start on a replica now?

The staleness bound and the end of the run are kept by `Schedule` itself, for every rule; a rule here
says what one replica can use. It is asked about a replica as it is, or as it will be after a pull.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.schedule.deadlines import NO_LIMIT
from millrace.schedule.view import ReplicaView, View


class Admit(Protocol):
    """The decision to start groups."""

    def room(self, view: View, replica: ReplicaView) -> int:
        """New groups that `replica` has use for now, 0 or more."""

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class WithinBound:
    """All that the staleness bound allows, in a queue of at most `rounds_max` times a replica's slots.

    The short queue keeps a replica busy and binds groups late: to whoever is free, at younger weights.
    None: no queue limit, so that a whole batch starts at once.
    """

    rounds_max: int | None = None

    def room(self, view: View, replica: ReplicaView) -> int:
        if self.rounds_max is None:
            return NO_LIMIT
        return _groups_to_fill(self.rounds_max * replica.slots - replica.load, view.group_size)

    def describe(self) -> str:
        queue = "" if self.rounds_max is None else f", at most {self.rounds_max} x slots on a replica"
        return f"while every live group can be trained within the staleness bound{queue}"


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Laminar: a replica starts a round of groups under one version, as its KV cache has room.

    Slots: another group starts while one of the `batch_max` slots (None: all) is free; the members
    that find none wait in the replica. KV: running trajectories count with what they hold,
    waiting ones and the new group with the most that they may need; an idle replica may always start
    one group. Rounds: `round_groups` groups, None: the replica's share of a batch. The next round begins when
    the replica is empty and serves the newest weights.

    Source: Laminar, arXiv:2510.12633 (trajectory-level generation). There the round is the engine's maximum
    batch. Here it is a share of the trainer's batch by default: on a small machine a few replicas would else
    run far ahead of the trainer.
    """

    round_groups: int | None = None
    batch_max: int | None = None

    def room(self, view: View, replica: ReplicaView) -> int:
        slots = self.batch_max or replica.slots
        by_slots = _groups_to_fill(slots - replica.load, view.group_size)
        return min(self._round_left(view, replica), by_slots, _groups_in_kv(view, replica))

    def _round_left(self, view: View, replica: ReplicaView) -> int:
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
    """A replica that serves the newest weights starts as many groups as fill its slots, again and again, as
    far as its KV cache has room (counted as in `KVRoom`). Half a group and more waits there, so that a slot
    which becomes free is filled at once and not after the next decision.

    Laminar starts a round and lets the replica run empty; here it goes on until newer weights exist, and runs
    empty only then. So decode batches stay full, and no group starts under weights that are already old.
    """

    def room(self, view: View, replica: ReplicaView) -> int:
        if view.behind(replica):
            return 0
        wanted = replica.slots + view.group_size // 2
        by_slots = _groups_to_fill(wanted - replica.load, view.group_size)
        return min(by_slots, _groups_in_kv(view, replica))

    def describe(self) -> str:
        return "while the replica serves the newest weights and has free slots and KV room"


def _groups_in_kv(view: View, replica: ReplicaView) -> int:
    """New groups that have KV room. A running trajectory counts with what it holds, a waiting or new one with
    the most that it may need. An idle replica has room for one group."""
    promised = replica.kv_used_tokens + replica.waiting * view.max_sequence_tokens
    group_tokens = view.group_size * view.max_sequence_tokens
    groups = max(0, replica.kv_capacity_tokens - promised) // group_tokens
    return max(1, groups) if replica.load == 0 else groups


def _groups_to_fill(free_slots: int, group_size: int) -> int:
    """Groups that it takes to leave none of `free_slots` empty."""
    return max(0, -(-free_slots // group_size))
