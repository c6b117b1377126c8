"""Trajectories and groups end untrained, with a reason, and nothing works on them any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from millrace.config.tables.task import EnvironmentRewardSection
from millrace.controller import episode
from millrace.controller.context import RunContext
from millrace.controller.state.groups import GroupRecord
from millrace.controller.state.run_state import RunState
from millrace.controller.state.trajectories import REDUNDANT
from millrace.core import clock
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import State, Trajectory, Work
from millrace.schedule.view import View

REDUNDANT_GROUP = "redundant: its batch is complete without its group"


def end_group(run: RunContext, group_id: int, state: State, reason: str) -> None:
    """End the live members of a group."""
    run.state.end_group(group_id, state, reason)
    run.stop_work()


def poisoned(run: RunContext, trajectory: Trajectory, replica: str) -> None:
    """Too many replicas died while they decoded `trajectory`: end its group and never draw its row again."""
    row_id = run.state.groups[trajectory.group_id].group.row_id
    reason = f"{run.state.numbers.attempts} replicas died before its next token, last {replica}"
    run.state.quarantine(row_id)
    run.events.emit("quarantined", row_id=row_id, reason=reason)
    end_group(run, trajectory.group_id, State.ABANDONED, reason)


def expire(run: RunContext, view: View) -> bool:
    """End the groups that cannot be trained in time any more. Returns whether there were any."""
    late = run.schedule.expire(view)
    over = view.steps_left <= 0
    for group_id in end_parked(run.state) + late if over else late:
        if run.schedule.parks and not over:
            for trajectory_id in park(run, group_id):
                run.pool.restart(trajectory_id)
        elif run.schedule.redundant_groups or run.schedule.parks:
            end_group(run, group_id, State.REJECTED, REDUNDANT_GROUP)
        else:
            end_group(run, group_id, State.STALE, f"beyond the staleness bound at {run.state.version}")
    run.stop_work()
    return bool(late)


def end_late_waits(run: RunContext) -> None:
    """End the trajectories that have waited too long for their environments."""
    reward = run.config.reward
    limit_s = reward.group_wait_s if isinstance(reward, EnvironmentRewardSection) else None
    late = late_waits(run.state.groups.values(), clock.now(), limit_s, session_s=run.began_s)
    for trajectory in late:
        reason = f"it waited when `reward.group_wait_s` ({limit_s:g} s) had passed since its group began"
        run.state.end(trajectory, State.FAILED, reason)
    run.stop_work()


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
        discarded = len(member.columns)
        episode.restart(member, one_version=True)
        member.columns = TokenColumns()  # without a prompt of its own
        if discarded:
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
        yield replica, [state.lease(m, replica) for m in group.members if m.trajectory_id in state.queued]


def end_parked(state: RunState) -> list[int]:
    """The run is over: the parked groups are live again, to be ended. Returns their ids."""
    groups = state.parked.clear()
    for group in groups:
        state.adopt(group, birth=state.version)
    return [group.group_id for group in groups]
