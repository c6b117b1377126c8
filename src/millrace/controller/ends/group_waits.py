"""Which trajectories wait no longer for their environments. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.controller.state.groups import GroupRecord
from millrace.core.types import State, Trajectory


def late_waits(
    groups: Iterable[GroupRecord], now_s: float, limit_s: float | None, *, session_s: float
) -> list[Trajectory]:
    """The trajectories that wait for an answer, of groups that started `limit_s` ago or earlier. None: there
    is no limit.

    What a replica decodes goes on, until it has to wait too. A group from before the controller's last start
    counts from that start, `session_s`.
    """
    if limit_s is None:
        return []
    late = []
    for record in groups:
        started_s = session_s if record.started_s is None else record.started_s
        if now_s - started_s >= limit_s:
            late += [member for member in record.group.members if member.state is State.WAITING]
    return late
