"""One device in turns: who may hold its memory now, and who sleeps or wakes next. Pure.

The device is lent to one side at a time: to the trainer, or to the replicas. The trainer wants it while it
has something to compute: a batch that was taken, a version to publish, weights to load. So the turns follow
from the other decisions of the schedule. A batch that is whole ends the turn of the replicas. A trainer that
can take no batch ends its own turn.

    the trainer wants it     the replicas sleep; trajectories in flight wait, with their tokens
    no replica is awake      the trainer wakes, makes its steps, publishes, and sleeps
    it wants nothing more    the replicas wake and pull the newest version; the trajectories go on

Nothing is remembered: a decision is a function of the view, so it is the same again after a crash.

Safe: a worker gets the order to wake only while no worker of the other side may hold memory. From that order
on it may hold memory, until its sleep is over or its process is dead.

Live: a side waits only for workers that were told to sleep. Each of these calls has a deadline, and its
owner, the session of that worker, kills a process that misses it. A dead process holds no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Use(StrEnum):
    """Of the device, by one replica. It may hold memory in all states but `ASLEEP`."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"


class DeviceView(msgspec.Struct, frozen=True):
    """`wanted`: the trainer has something to compute. `trainer_awake`: it may hold memory. `replicas`: those
    whose process lives."""

    wanted: bool
    trainer_awake: bool
    replicas: Mapping[str, Use]


class HandOver(msgspec.Struct, frozen=True):
    """`sleeps` and `wakes`: replicas, in their order. `granted`: the trainer may wake."""

    sleeps: tuple[str, ...] = ()
    wakes: tuple[str, ...] = ()
    granted: bool = False


def hand_over(view: DeviceView) -> HandOver:
    """What happens next. A replica that is told nothing goes on with what it was told before."""
    if view.wanted or view.trainer_awake:
        awake = tuple(name for name, use in view.replicas.items() if use is Use.AWAKE)
        return HandOver(sleeps=awake, granted=set(view.replicas.values()) <= {Use.ASLEEP})
    return HandOver(wakes=tuple(name for name, use in view.replicas.items() if use is Use.ASLEEP))
