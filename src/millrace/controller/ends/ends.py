"""Trajectories and groups end untrained, with a reason, and nothing works on them any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.controller.ends.group_waits import late_waits
from millrace.controller.ends.parking import end_parked, park
from millrace.controller.state.orders import Abort
from millrace.core import clock
from millrace.core.types import State, Trajectory
from millrace.schedule.view import View

if TYPE_CHECKING:
    from millrace.controller.context import RunContext

REDUNDANT_GROUP = "redundant: its batch is complete without its group"


def stop_work(run: RunContext) -> None:
    """Stop the replicas that work on trajectories that have ended. Reward workers stop before the ledger
    says so (`RunContext.update_ledger`)."""
    workers: dict[str, list[int]] = {}
    for trajectory_id, replica in run.state.cut:
        workers.setdefault(replica, []).append(trajectory_id)
    run.state.cut = []
    for replica, ids in workers.items():
        run.mailboxes[replica].put(Abort(ids))


def end_group(run: RunContext, group_id: int, state: State, reason: str) -> None:
    """End the live members of a group."""
    run.state.end_group(group_id, state, reason)
    stop_work(run)


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
    stop_work(run)
    return bool(late)


def end_late_waits(run: RunContext) -> None:
    """End the trajectories that have waited too long for their environments."""
    limit_s: float | None = getattr(run.config.reward, "group_wait_s", None)
    late = late_waits(run.state.groups.values(), clock.now(), limit_s, session_s=run.began_s)
    for trajectory in late:
        reason = f"it waited when `reward.group_wait_s` ({limit_s:g} s) had passed since its group began"
        run.state.end(trajectory, State.FAILED, reason)
    stop_work(run)
