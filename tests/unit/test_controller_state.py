"""The controller's record of a run: transitions that are easy to get wrong."""

from __future__ import annotations

from millrace.controller.state import RunState, Shape
from millrace.core.types import Finish, Progress, Prompt, Sampling, Scored, State

SHAPE = Shape(
    steps=4,
    batch_groups=1,
    group_size=3,
    slots=4,
    max_sequence_tokens=64,
    sampling=Sampling(max_tokens=8),
    seed=0,
    attempts=3,
)


def complete(state: RunState, trajectory_id: int) -> None:
    part = Progress(trajectory_id, 1, 0, [5], [-1.0], 0, Finish.STOP)
    state.progress("replica-0", [part])
    state.score(trajectory_id, Scored(1.0))


def test_a_group_that_ends_while_two_of_it_are_scored_leaves_nothing_to_train() -> None:
    state = RunState(SHAPE, ["replica-0"])
    state.replica_up("replica-0", 1)
    state.replicas["replica-0"].version = 0
    state.admit(Prompt(0, "row-0", [1, 2], "text"), "replica-0")
    complete(state, 1)
    complete(state, 2)
    state.end_group(0, State.ABANDONED, "its replicas died")
    assert not state.groups and not state.trajectories
    assert [t.state for t in state.ended] == [State.ABANDONED] * 3
    assert state.view().groups == ()
