"""Home: which trajectories go on where their last turn was sampled, and their keys and values may be?"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from millrace.schedule.view import QueuedView, ReplicaView, View


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
