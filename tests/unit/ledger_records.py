"""Groups and trajectories for tests of the ledger."""

from __future__ import annotations

from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import (
    EvaluationAttempt,
    EvaluationRecord,
    Finish,
    Group,
    State,
    StepRecord,
    Trajectory,
)

GROUP_SIZE = 2


def make_group(group_id: int) -> Group:
    first = group_id * GROUP_SIZE
    members = [Trajectory(first + i, group_id) for i in range(GROUP_SIZE)]
    return Group(
        group_id, f"row-{group_id}", token_array([1, 2, 3 + group_id]), f"prompt {group_id}", members, "0f"
    )


def lease(trajectory: Trajectory, replica: str = "replica-0") -> None:
    trajectory.state, trajectory.replica = State.LEASED, replica
    trajectory.epoch = 3
    trajectory.lease += 1


def grow(trajectory: Trajectory, num_tokens: int, version: int = 0) -> None:
    """Tokens that tell where they are and under which lease they were sampled."""
    for position in range(len(trajectory.columns), len(trajectory.columns) + num_tokens):
        trajectory.columns.append(1000 * trajectory.lease + position, -0.5 - position, version)


def restart(trajectory: Trajectory) -> None:
    trajectory.columns = TokenColumns()
    trajectory.state = State.QUEUED


def complete(trajectory: Trajectory, reward: float = 1.0) -> None:
    trajectory.finish, trajectory.reward = Finish.STOP, reward
    trajectory.state = State.BUFFERED
    trajectory.metrics = {"correct": reward}


def ready_group(group_id: int, version: int = 0, num_tokens: int = 4) -> Group:
    group = make_group(group_id)
    for member in group.members:
        lease(member)
        grow(member, num_tokens, version)
        complete(member)
    return group


def step_of(version: int, *groups: Group) -> StepRecord:
    ids = [member.trajectory_id for group in groups for member in group.members]
    return StepRecord(version, [group.group_id for group in groups], ids, {"loss": 0.5})


def evaluation_of(version: int) -> tuple[EvaluationRecord, list[EvaluationAttempt]]:
    attempts = [
        EvaluationAttempt(0, "row-7", 0, token_array([5, 6]), Finish.STOP, 1.0, answer="56"),
        EvaluationAttempt(0, "row-7", 1, token_array([]), Finish.LENGTH, None, reason="it raised"),
    ]
    return EvaluationRecord("held-out", version, {"greedy_accuracy": 1.0}, took_s=2.0), attempts
