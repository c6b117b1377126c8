"""Groups are left behind by a short round, and begin again in a long one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from millrace.controller.state.run_state import RunState
from millrace.controller.state.trajectories import REDUNDANT
from millrace.controller.turns import episode
from millrace.core.types import State, Work

if TYPE_CHECKING:
    from millrace.controller.context import RunContext

PARKED = "its group waits for a long round"


def park(run: RunContext, group_id: int) -> list[int]:
    """The trajectories of a live group lose their tokens and rewards, and wait. Those beyond a group end.
    Returns those that no reward worker is busy with: their episodes are to be closed."""
    state = run.state
    live = [m for m in state.groups[group_id].group.members if m.live]
    staying = live[: state.numbers.samples]  # a request of another member is forgotten, perhaps unanswered
    unanswered = [m.trajectory_id for m in staying if m.state in episode.UNANSWERED]
    for member in live:
        if member.state is State.LEASED:
            state.cut.append((member.trajectory_id, member.replica))
            state.unlease(member)
        member.state, member.finish, member.reward = State.QUEUED, None, None
        if discarded := episode.restart(member, one_version=True):
            run.events.emit(
                "restarted", trajectory_id=member.trajectory_id, discarded_tokens=discarded, reason=PARKED
            )
        state.dirty[member.trajectory_id] = member
    for member in live[len(staying) :]:
        state.end(member, State.REJECTED, REDUNDANT)
    group = state.remove(group_id)
    for member in group.members:
        state.queued.pop(member.trajectory_id, None)
        state.trajectories.pop(member.trajectory_id, None)
    state.parked.add(group, unanswered)
    return [m.trajectory_id for m in staying if m.trajectory_id not in unanswered]


def bring_back(run: RunContext, replicas: Sequence[str]) -> Iterator[tuple[str, list[Work]]]:
    """A parked group begins again on each of `replicas`, the oldest first: with its leases."""
    state = run.state
    for replica, group in zip(replicas, state.parked.ready, strict=False):
        version = state.replicas[replica].version
        state.adopt(group, birth=version)
        state.groups[group.group_id].birth = version  # not that of members that have ended
        state.parked.begin_again(group, state.groups)
        yield replica, [state.lease(member, replica) for member in group.members if member.live]


def end_parked(state: RunState) -> list[int]:
    """The run is over: the parked groups are live again, to be ended. Returns their ids."""
    groups = state.parked.clear()
    for group in groups:
        state.adopt(group, birth=state.version)
    return [group.group_id for group in groups]
