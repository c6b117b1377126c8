"""The controller's record of a run: transitions that are easy to get wrong."""

from __future__ import annotations

from dataclasses import replace

from millrace.controller.run_numbers import RunNumbers
from millrace.controller.state.relays import Relays
from millrace.controller.state.run_state import RunState
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.placement import THIS_HOST
from millrace.core.types import Finish, Progress, Prompt, Sampling, Scored, State

NUMBERS = RunNumbers(
    steps=4,
    batch_groups=1,
    group_size=3,
    slots=4,
    max_sequence_tokens=64,
    sampling=Sampling(max_tokens=8),
    seed=0,
    attempts=3,
)


def run_state(numbers: RunNumbers, replicas: list[str]) -> RunState:
    """On one host."""
    return RunState(numbers, dict.fromkeys(replicas, THIS_HOST), Relays([THIS_HOST], roots=[THIS_HOST]))


def complete(state: RunState, trajectory_id: int) -> None:
    part = Progress(trajectory_id, 1, 0, TokenColumns.of([5], [-1.0], 0), Finish.STOP)
    state.progress("replica-0", [part])
    state.score(trajectory_id, Scored(1.0))


def test_a_group_that_ends_while_two_of_it_are_scored_leaves_nothing_to_train() -> None:
    state = run_state(NUMBERS, ["replica-0"])
    state.replicas.up("replica-0", 1)
    state.replicas.served("replica-0", 0)
    state.admit(Prompt(0, "row-0", token_array([1, 2]), "text"), "replica-0", now_s=0.0)
    complete(state, 1)
    complete(state, 2)
    state.end_group(0, State.ABANDONED, "its replicas died")
    assert not state.groups and not state.trajectories
    assert [t.state for t in state.ended] == [State.ABANDONED] * 3
    assert state.view().groups == ()


def test_only_what_was_decoding_is_charged_for_the_death_of_a_replica() -> None:
    state = run_state(replace(NUMBERS, slots=2, attempts=2), ["a"])
    poisoned = []
    for epoch in (1, 2):
        state.replicas.up("a", epoch)
        state.replicas.served("a", 0)
        if epoch == 1:
            state.admit(Prompt(0, "row-0", [1, 2], "text"), "a", now_s=0.0)
        for trajectory in list(state.queued.values()):
            state.lease(trajectory, "a")
        poisoned += [t.trajectory_id for t in state.replica_down("a")]
    assert poisoned == [0, 1], "the third waited for a slot"


def test_a_destination_of_two_moves_is_busy_until_both_have_ended() -> None:
    state = run_state(NUMBERS, ["a", "b", "c"])
    for name in "abc":
        state.replicas.up(name, 1)
    state.replicas.begin_move("a", ["c"])
    state.replicas.begin_move("b", ["c"])
    assert state.replicas.end_move("a", ["c"]) == ["c"]
    assert [state.replicas[name].busy for name in "abc"] == [False, True, True]
    assert state.replicas.end_move("b", ["c"]) == ["c"]
    assert not any(replica.busy for replica in state.replicas.values())


def test_a_destination_that_died_meanwhile_is_none_any_more() -> None:
    state = run_state(NUMBERS, ["a", "b", "c"])
    for name in "abc":
        state.replicas.up(name, 1)
    state.replicas.begin_move("a", ["b", "c"])
    state.replica_down("b")
    state.replicas.up("b", 2)
    assert state.replicas.end_move("a", ["b", "c"]) == ["c"]
    assert state.replicas.end_move("a", ["b", "c"]) == [], "it has ended"
