"""A trajectory that waits for its environment, and goes on with the observation."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.test_controller_state import NUMBERS, run_state

from millrace.controller.state.groups import make_batch
from millrace.controller.state.run_state import RunState
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.turns.turn_bounds import ENVIRONMENT_S, NO_BOUNDS, TurnBounds
from millrace.core.types import Failed, Finish, Observed, Progress, Prompt, Scored, State, Work
from millrace.rollout.continuation import Continuation
from millrace.schedule.view import QueuedView

EPISODE = NUMBERS.sampling.max_tokens + 2
"""Most sampled tokens of an episode."""


def started(bounds: TurnBounds = NO_BOUNDS, *, one_version: bool = False) -> tuple[RunState, Work]:
    numbers = replace(NUMBERS, episode_tokens=EPISODE, group_size=2, one_version=one_version)
    state = run_state(numbers, ["a", "b"])
    for name in ("a", "b"):
        state.replicas.up(name, 1)
        state.replicas.served(name, 0)
    _, works = state.admit(Prompt(0, "row-0", token_array([1, 2]), "text", bounds), "a", now_s=0.0)
    return state, works[0]


def turn(
    state: RunState,
    work: Work,
    tokens: list[int],
    version: int = 0,
    replica: str = "a",
    finish: Finish = Finish.STOP,
) -> None:
    columns = TokenColumns.of(tokens, [-1.0] * len(tokens), version)
    state.progress(replica, [Progress(work.trajectory_id, work.lease, len(work.tokens), columns, finish)])


def test_a_turn_waits_and_its_observation_makes_the_next_lease() -> None:
    state, work = started()
    turn(state, work, [5, 3])
    trajectory = state.trajectories[0]
    assert (trajectory.state, trajectory.finish) == (State.WAITING, Finish.TURN)
    request = state.score_request(trajectory)
    assert (request.turns, request.room) == ([(0, 2, True)], NUMBERS.max_sequence_tokens - 4)
    state.score(0, Observed(token_array([7, 8]), {"turn_1": 0.5}))
    assert (trajectory.state, trajectory.finish) == (State.QUEUED, None)
    assert state.queued_view(trajectory).version is None  # any version may sample the next turn
    assert state.view().versions_queued == ()
    state.replicas.served("b", 1)
    again = state.lease(trajectory, "b")
    assert list(again.tokens) == [5, 3, 7, 8]
    assert (again.turn_start, again.sampling.max_tokens) == (4, 4 + NUMBERS.sampling.max_tokens)
    turn(state, again, [6], version=1, replica="b")
    state.score(0, Scored(1.0, {"turn_2": 1.0}))
    assert (trajectory.state, trajectory.finish) == (State.SCORED, Finish.STOP)
    assert trajectory.metrics == {"turn_1": 0.5, "turn_2": 1.0}
    assert state.groups[0].birth == 0


def test_a_batch_trains_what_was_sampled() -> None:
    state, work = started()
    for tid, lease in ((0, work), (1, None)):
        lease = lease or replace_lease(state, tid)
        turn(state, lease, [5, 3])
        state.score(tid, Observed(token_array([7]), {}))
        turn(state, state.lease(state.trajectories[tid], "a"), [6])
        state.score(tid, Scored(float(tid)))
    batch = make_batch(0, [state.groups[0].group])
    assert [sequence.mask for sequence in batch.groups[0].sequences] == [[True, True, False, True]] * 2
    assert [sequence.num_trained for sequence in batch.groups[0].sequences] == [3, 3]


def replace_lease(state: RunState, tid: int) -> Work:
    state.unlease(state.trajectories[tid])
    return state.lease(state.trajectories[tid], "a")


def test_a_restart_drops_the_present_turn_alone() -> None:
    state, work = started()
    turn(state, work, [5, 3])
    state.score(0, Observed(token_array([7])))
    trajectory = state.trajectories[0]
    again = state.lease(trajectory, "a")
    part = Progress(0, again.lease, 3, TokenColumns.of([6, 6], [-1.0, -1.0], 0))
    state.progress("a", [part])
    state.unlease(trajectory)
    assert state.restart(trajectory) == (2, False)
    assert list(trajectory.columns.tokens) == [5, 3, 7]
    assert trajectory.columns.turns() == [(0, 2, True), (2, 3, False)]


def test_a_failed_environment_is_no_reward_of_zero() -> None:
    state, work = started()
    turn(state, work, [5])
    state.score(0, Failed("the environment raised"))
    assert 0 not in state.trajectories
    assert [(t.state, t.reward) for t in state.ended] == [(State.FAILED, None)]


def test_a_budget_ends_an_episode_as_truncated() -> None:
    state, work = started()
    turn(state, work, [5])
    state.score(0, Scored(0.0, truncated=True))
    assert state.trajectories[0].finish is Finish.LENGTH


def test_what_stood_before_the_turn_ends_nothing() -> None:
    """Token 3 ends a turn, and the text "stop" does."""
    decode = {5: "go", 3: "<end>", 7: "stop", 6: "on"}
    _, work = started()
    from msgspec.structs import replace as changed

    sampling = changed(work.sampling, stop=("stop",), max_tokens=12)
    work = changed(work, tokens=token_array([5, 3, 7]), turn_start=3, sampling=sampling)
    more = Continuation(
        work,
        eos_ids=frozenset([3]),
        max_sequence_tokens=64,
        decode=lambda tokens: "".join(decode[token] for token in tokens),
        vocab=10,
        engine="an engine",
    )
    assert more.finish is None
    more.append(6, -1.0, 0)
    assert more.finish is None
    more.append(3, -1.0, 0)
    assert more.finish is Finish.STOP


def test_the_home_of_a_turn_is_the_process_that_sampled_the_one_before() -> None:
    state, work = started()
    trajectory = state.trajectories[0]
    assert state.queued_view(state.trajectories[1]) == QueuedView(None, 0)  # it has had no turn
    turn(state, work, [5, 3])
    state.score(0, Observed(token_array([7]), {}))
    assert state.queued_view(trajectory) == QueuedView(None, 0, "a", tokens=3)
    state.replica_down("a")
    assert state.queued_view(trajectory) == QueuedView(None, 0, tokens=3)
    state.replicas.up("a", 2)  # another process of that name has none of its keys and values
    assert state.queued_view(trajectory) == QueuedView(None, 0, tokens=3)


def test_a_turn_that_was_lost_in_its_middle_has_no_home() -> None:
    state, work = started()
    state.progress("a", [Progress(0, work.lease, 0, TokenColumns.of([5], [-1.0], 0), None)])
    state.give_back("a")
    assert state.queued_view(state.trajectories[0]) == QueuedView(0, 0, tokens=1)


def test_the_tokens_of_an_episode_bound_its_next_turn() -> None:
    state, work = started()
    turn(state, work, [5, 5, 5, 3])
    state.score(0, Observed(token_array([7])))
    again = state.lease(state.trajectories[0], "a")
    assert again.sampling.max_tokens == 5 + EPISODE - 4


def test_the_seconds_of_an_environment_are_recorded_with_its_answer() -> None:
    state, work = started()
    turn(state, work, [5])
    assert state.score_request(state.trajectories[0]).spent_s == 0.0
    state.score(0, Observed(token_array([7]), {ENVIRONMENT_S: 2.5}))
    turn(state, state.lease(state.trajectories[0], "a"), [6])
    assert state.score_request(state.trajectories[0]).spent_s == 2.5


def test_the_bounds_of_a_request_bound_its_turn_alone() -> None:
    state, work = started(TurnBounds(2, ("END",), (4, 11)))
    assert (work.sampling.max_tokens, work.sampling.stop) == (2, (*NUMBERS.sampling.stop, "END"))
    assert work.sampling.stop_token_ids == (*NUMBERS.sampling.stop_token_ids, 4, 11)
    turn(state, work, [5, 3], finish=Finish.LENGTH)
    trajectory = state.trajectories[0]
    assert (trajectory.state, trajectory.finish) == (State.WAITING, Finish.TURN)
    state.score(0, Observed(token_array([7]), bounds=TurnBounds(1)))
    again = state.lease(trajectory, "a")
    assert (again.sampling.max_tokens, again.sampling.stop) == (3 + 1, NUMBERS.sampling.stop)
    assert again.sampling.stop_token_ids == NUMBERS.sampling.stop_token_ids
    turn(state, again, [6], finish=Finish.LENGTH)
    state.score(0, Observed(token_array([7])))
    last = state.lease(trajectory, "a")
    assert last.sampling.max_tokens == 5 + EPISODE - 3
    turn(state, last, [6] * (EPISODE - 3), finish=Finish.LENGTH)
    assert (trajectory.state, trajectory.finish) == (State.GENERATED, Finish.LENGTH)
    state.score(0, Scored(1.0, truncated=True))
    assert trajectory.metrics == {}


def test_a_turn_that_is_cut_before_what_its_request_asks_ends_the_episode() -> None:
    state, work = started(TurnBounds(100))
    assert work.sampling.max_tokens == NUMBERS.sampling.max_tokens
    turn(state, work, [5] * NUMBERS.sampling.max_tokens, finish=Finish.LENGTH)
    assert state.trajectories[0].state is State.GENERATED


def test_a_turn_of_exactly_the_most_tokens_of_the_run_goes_on_if_its_request_asks_for_them() -> None:
    most = NUMBERS.sampling.max_tokens
    state, work = started(TurnBounds(most))
    turn(state, work, [5] * most, finish=Finish.LENGTH)
    assert state.trajectories[0].state is State.WAITING


def test_a_turn_without_room_for_a_token_has_no_bound_to_reach() -> None:
    state, work = started()
    turn(state, work, [], finish=Finish.LENGTH)
    assert state.trajectories[0].state is State.GENERATED


def test_an_episode_that_begins_again_has_its_first_bounds() -> None:
    state, work = started(TurnBounds(2), one_version=True)
    turn(state, work, [5, 3])
    state.score(0, Observed(token_array([7]), bounds=TurnBounds(1, ("x",))))
    state.restart(state.trajectories[0])
    again = state.lease(state.trajectories[0], "a")
    assert (again.sampling.max_tokens, again.sampling.stop) == (2, NUMBERS.sampling.stop)
