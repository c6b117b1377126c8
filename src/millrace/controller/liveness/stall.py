"""A run without progress, in words."""

from __future__ import annotations

from millrace.controller.context import RunContext


def describe_waits(run: RunContext) -> list[str]:
    """Who waits for whom, one line each: open waits, the longest first, then idle work."""
    state = run.state
    lines = run.waits.describe()
    for name, replica in state.replicas.items():
        if not replica.alive:
            lines.append(f"{name} is not up")
        elif replica.leased:
            what = f"{len(replica.leased)} trajectories at version {replica.version}"
            lines.append(f"{name} owes tokens of {what}")
    if not state.replicas:
        lines.append("the run has no replica: `millrace scale RUN --replicas N` adds some")
    if state.queued:
        lines.append(f"{len(state.queued)} trajectories wait for a replica")
    if run.pool.num_requests:
        lines.append(f"{run.pool.num_requests} completions wait for a reward worker")
    return lines + run.evaluations.describe_waits()
