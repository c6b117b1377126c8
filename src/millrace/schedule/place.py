"""Place: on which replicas do queued trajectories go on? A safeguard, the same for all schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from millrace.schedule.view import QueuedView, ReplicaView, View

_Entry = tuple[bool, int, float, int, int]
"""No free slot, minus the version, load per slot, place in the order of the replicas, load: least first."""


def placements(view: View, queued: Sequence[QueuedView], *, mixes_versions: bool) -> list[str | None]:
    """A replica for each of `queued`, in their order; None: wait. Each placed trajectory counts as load.

    Partial tokens go on under their own version, or under that or a later one if the schedule mixes versions.
    A trajectory without tokens may take any version from the birth of its group on, so that the group's
    deadline stays. A turn that stays `at_home` is placed first. Otherwise free slots are preferred, then the
    newest version, then the lowest load.

    Cost: for n trajectories, R replicas and V versions served, O(R + n (V + log R)).
    """
    view, homes = at_home(view, queued)
    if None not in homes:
        return homes
    heaps: dict[int, list[_Entry]] = defaultdict(list)
    for index, replica in enumerate(view.replicas):
        if replica.serving:
            heaps[replica.version].append(_entry(replica, index, replica.load))
    for heap in heaps.values():
        heapify(heap)
    placed: list[str | None] = []
    for trajectory, home in zip(queued, homes, strict=True):
        oldest = trajectory.birth if trajectory.version is None else trajectory.version
        exact = trajectory.version is not None and not mixes_versions
        fit = [
            heap for version, heap in heaps.items() if version == oldest or (version > oldest and not exact)
        ]
        if home is not None or not fit:
            placed.append(home)
            continue
        heap = min(fit, key=lambda heap: heap[0])
        *_, index, load = heappop(heap)
        heappush(heap, _entry(view.replicas[index], index, load + 1))
        placed.append(view.replicas[index].replica_id)
    return placed


def _entry(replica: ReplicaView, index: int, load: int) -> _Entry:
    return load >= replica.slots, -replica.version, load / replica.slots, index, load


def at_home(view: View, queued: Sequence[QueuedView]) -> tuple[View, list[str | None]]:
    """For each of `queued` its home, if it goes on there; None: it may go on anywhere. Each one counts as
    load in the view that is returned.

    A home that is full or busy is passed over: a turn never waits for its home. So is a home that has taken
    other weights since, because its keys and values are gone. And so is a home that is behind, if a replica
    with a free slot serves newer weights: turns that come back must not keep it from them.
    """
    replicas = {replica.replica_id: replica for replica in view.replicas}
    newest = max((r.version for r in view.replicas if r.serving and r.load < r.slots), default=-1)
    homes: list[str | None] = []
    for trajectory in queued:
        home = replicas.get(trajectory.home)
        if home is not None and _is_fit(view, home, trajectory.birth, newest):
            replicas[home.replica_id] = replace(home, waiting=home.waiting + 1)
            homes.append(home.replica_id)
        else:
            homes.append(None)
    return replace(view, replicas=tuple(replicas.values())), homes


def _is_fit(view: View, home: ReplicaView, version: int, newest: int) -> bool:
    has_room = home.serving and home.load < home.slots
    gives_way = home.version < newest and view.behind(home)
    return has_room and home.version == version and not gives_way
