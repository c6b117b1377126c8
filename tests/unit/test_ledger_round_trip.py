"""What the ledger gives back is what was recorded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_records import complete, grow, lease, make_group, ready_group, restart, step_of

from millrace.core.completion.columns import TokenColumns
from millrace.core.turns.turn_bounds import UNBOUNDED, EpisodeBounds, TurnBounds
from millrace.core.types import (
    TERMINAL,
    BadPrompt,
    CheckpointInfo,
    Finish,
    Group,
    State,
    Trajectory,
)
from millrace.ledger import SqliteLedger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def reopen(ledger: SqliteLedger, path: Path) -> SqliteLedger:
    ledger.close()
    return SqliteLedger(path, run={})


def whole(info: CheckpointInfo) -> bool:
    return True


def test_a_new_ledger_holds_nothing(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    recovered = ledger.recover()
    assert (recovered.next_group_id, recovered.version, ledger.checkpoint()) == (0, 0, None)
    assert recovered.groups == [] and ledger.steps_after(0) == []
    assert ledger.accounting().balanced and ledger.accounting().admitted == 0


def test_every_field_of_a_group_comes_back(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = ready_group(0)
    group.members[0].state, group.members[0].reason = State.REJECTED, "too long"
    group.members[0].finish = Finish.LENGTH
    ledger.admit([group])
    assert reopen(ledger, path).recover().groups == [group]


def test_the_bounds_of_a_turn_come_back_and_go_with_the_turn(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([group := make_group(0)])
    first = group.members[0]
    first.metrics, first.bounds = {"next_turn:x": 1.0}, EpisodeBounds(next=TurnBounds(2, ("END",), (4, 11)))
    ledger.close()
    ledger = SqliteLedger(path, run={})
    found = ledger.recover().groups[0].members[0]
    assert (found.metrics, found.bounds) == (first.metrics, first.bounds)
    found.bounds = UNBOUNDED
    ledger.update([found])
    ledger.close()
    ledger = SqliteLedger(path, run={})
    assert ledger.recover().groups[0].members[0].bounds == UNBOUNDED
    ledger.close()


def test_log_probs_come_back_bit_for_bit(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    finished, growing = group.members
    for member in group.members:
        logprobs = [-0.5, float("-inf"), float("nan"), -0.0, 0.0, -1e-45]
        member.columns = TokenColumns.of([7, 2**31 - 1, 0, 1, 2, 3], logprobs, [3, 4, 4, 3, 3, 9])
    finished.state, finished.finish = State.GENERATED, Finish.STOP
    assert growing.state is State.QUEUED
    ledger.admit([group])
    assert reopen(ledger, path).recover().groups == [group]


def test_leased_trajectories_are_queued_again_with_the_tokens_they_have(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    lease(group.members[0])
    grow(group.members[0], 5)
    ledger.admit([group])
    ledger.flush()
    ledger = reopen(ledger, path)
    member = ledger.recover().groups[0].members[0]
    assert (member.state, member.replica, member.epoch) == (State.QUEUED, "", 0)
    assert member.columns == group.members[0].columns
    assert member.lease == 1, "a lease number is never used again"


@pytest.mark.parametrize("state", [State.GENERATED, State.SCORED, State.BUFFERED])
def test_what_is_generated_stays_so(path: Path, state: State) -> None:
    ledger = SqliteLedger(path, run={})
    group = ready_group(0)
    for member in group.members:
        member.state = state
    ledger.admit([group])
    assert [m.state for m in reopen(ledger, path).recover().groups[0].members] == [state, state]


def test_tokens_flushed_in_parts_come_back_whole(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    ledger.admit([group])
    for version, member in ((0, 0), (0, 1), (1, 0), (2, 0)):
        lease(group.members[member])
        grow(group.members[member], 3, version)
        ledger.update([group.members[member]])
        ledger.flush()
    found = reopen(ledger, path).recover().groups[0].members
    assert [m.columns for m in found] == [m.columns for m in group.members]
    assert found[0].columns.runs == [(0, 3), (1, 3), (2, 3)]


def test_a_recovered_trajectory_grows_on(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    lease(group.members[0])
    grow(group.members[0], 3)
    ledger.admit([group])
    ledger = reopen(ledger, path)
    member = ledger.recover().groups[0].members[0]
    lease(member)
    grow(member, 3)
    ledger.update([member])
    assert reopen(ledger, path).recover().groups[0].members[0].columns == member.columns


def test_a_restart_drops_tokens_even_when_it_has_grown_past_them_before_the_flush(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    member = group.members[0]
    lease(member)
    grow(member, 3)
    ledger.admit([group])
    ledger.flush()
    restart(member)
    lease(member)
    grow(member, 6)
    ledger.update([member])
    assert reopen(ledger, path).recover().groups[0].members[0].columns == member.columns


def test_tokens_cut_off_are_gone(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    member = group.members[0]
    lease(member)
    grow(member, 6)
    ledger.admit([group])
    ledger.flush()
    member.columns = member.columns[:2]
    ledger.update([member])
    assert len(reopen(ledger, path).recover().groups[0].members[0].columns) == 2


def test_only_new_tokens_are_written(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    ledger.admit([group])
    lease(group.members[0])
    grow(group.members[0], 100)
    ledger.update(group.members)
    ledger.flush()
    grow(group.members[0], 1)
    ledger.update(group.members)
    ledger.flush()
    sizes = ledger._db.execute("SELECT start, num_tokens FROM chunks ORDER BY start").fetchall()
    assert sizes == [(0, 100), (100, 1)]


def test_a_finished_trajectory_is_one_chunk(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    ledger.admit([group])
    for _ in range(3):
        grow(group.members[0], 5)
        ledger.update(group.members)
        ledger.flush()
    complete(group.members[0])
    ledger.update(group.members)
    ledger.flush()
    assert ledger._db.execute("SELECT start, num_tokens FROM chunks").fetchall() == [(0, 15)]


def test_the_next_group_follows_the_last_used_position(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([make_group(0), make_group(1)])
    ledger.skip([BadPrompt(2, "row-2", "too long")])
    recovered = reopen(ledger, path).recover()
    assert (recovered.next_group_id, recovered.unused_group_ids) == (3, [])


def test_positions_passed_over_are_told(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([make_group(1), make_group(4)])
    recovered = reopen(ledger, path).recover()
    assert (recovered.next_group_id, recovered.unused_group_ids) == (5, [0, 2, 3])


def test_steps_after_the_checkpoint_are_replayed_in_order_with_their_tokens(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    groups = [ready_group(i) for i in range(4)]
    ledger.admit(groups)
    order = [groups[2], groups[0], groups[3], groups[1]]
    for version, group in enumerate(order, 1):
        ledger.commit_step(step_of(version, group))
    ledger.commit_checkpoint(CheckpointInfo(2, "/checkpoints/v2", 0.1))
    ledger.close()
    ledger = SqliteLedger(path, run={}, checkpoint_ok=whole)
    recovered, checkpoint = ledger.recover(), ledger.checkpoint()
    assert recovered.version == 4 and recovered.groups == [] and checkpoint is not None
    assert ledger.steps_after(checkpoint.version) == [step_of(3, groups[3]), step_of(4, groups[1])]
    replayed = ledger.group(groups[3].group_id).members[0]
    assert replayed.columns == groups[3].members[0].columns
    assert (replayed.state, replayed.trained_version) == (State.TRAINED, 3)


def test_a_checkpoint_that_is_not_whole_is_passed_over(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    for version in (1, 2):
        group = ready_group(version)
        ledger.admit([group])
        ledger.commit_step(step_of(version, group))
        ledger.commit_checkpoint(CheckpointInfo(version, f"/v{version}", 0.1))
    ledger.close()
    ledger = SqliteLedger(path, run={}, checkpoint_ok=lambda info: info.path == "/v1")
    assert ledger.checkpoint() == CheckpointInfo(1, "/v1", 0.1)


def test_without_a_checkpoint_every_step_is_there_to_be_replayed(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    for version in (1, 2, 3):
        group = ready_group(version)
        ledger.admit([group])
        ledger.commit_step(step_of(version, group))
    ledger = reopen(ledger, path)
    assert [record.version for record in ledger.steps_after(0)] == [1, 2, 3]


def test_recovering_during_a_run_takes_nothing_back() -> None:
    ledger = SqliteLedger(":memory:", run={})
    group = make_group(0)
    lease(group.members[0])
    ledger.admit([group])
    ledger.recover()
    grow(group.members[0], 3)
    ledger.update(group.members)
    ledger.flush()
    states = ledger._db.execute("SELECT state FROM trajectories ORDER BY trajectory_id").fetchall()
    assert states == [("leased",), ("queued",)]
    assert ledger.recover().groups[0].members[0].columns == group.members[0].columns


def test_a_flush_writes_those_that_only_grew_in_turn_and_the_end_writes_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.ledger.buffer.GROWING_MIN", 2)
    ledger = SqliteLedger(path, run={})
    groups = [make_group(i) for i in range(3)]
    members = [member for group in groups for member in group.members]
    ledger.admit(groups)
    ledger.flush()
    for written in (2, 4, 6, 6):
        for member in members:
            grow(member, 1)
        ledger.grow(members)
        ledger.flush()
        found = ledger._db.execute("SELECT count(DISTINCT trajectory_id) FROM chunks").fetchone()[0]
        assert found == written
    assert reopen(ledger, path).recover().groups == groups


def crowded(monkeypatch: pytest.MonkeyPatch) -> tuple[SqliteLedger, list[Trajectory]]:
    """A ledger of 200 trajectories, of which a flush writes at least one that only grew."""
    monkeypatch.setattr("millrace.ledger.buffer.GROWING_MIN", 1)
    ledger = SqliteLedger(":memory:", run={})
    groups = [make_group(i) for i in range(100)]
    ledger.admit(groups)
    ledger.flush()
    return ledger, [member for group in groups for member in group.members]


def test_of_very_many_that_only_grew_each_is_written_within_40_flushes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, members = crowded(monkeypatch)
    for flushes in range(1, 41):
        for member in members:
            grow(member, 1)
        ledger.grow(members)
        ledger.flush()
        found = ledger._db.execute("SELECT count(DISTINCT trajectory_id) FROM chunks").fetchone()[0]
        assert found == flushes * len(members) // 40
    assert ledger._db.execute("SELECT count(*) FROM chunks").fetchone()[0] == len(members)


def test_flushes_that_follow_each_other_quickly_write_few_of_those_that_only_grew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, members = crowded(monkeypatch)
    for member in members:
        grow(member, 1)
    chunks = []
    for reported in (200, 0, 0, 12, 0):  # the turns of others go on in between
        ledger.grow(members[:reported])
        ledger.flush()
        chunks.append(ledger._db.execute("SELECT count(*) FROM chunks").fetchone()[0])
    assert chunks == [5, 6, 7, 10, 11]


def test_a_trajectory_that_changes_is_written_with_its_newest_tokens(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    ledger.admit([group])
    grow(group.members[0], 3)
    ledger.grow([group.members[0]])
    complete(group.members[0])
    ledger.update([group.members[0]])
    ledger.flush()
    ledger.flush()
    assert ledger._db.execute("SELECT start, num_tokens FROM chunks").fetchall() == [(0, 3)]


ACTIONS = ("admit", "lease", "grow", "restart", "cut", "complete", "reject", "train", "flush", "reopen")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 10**6)), max_size=40))
def test_any_history_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    ledger, groups, version = SqliteLedger(path, run={}), {}, 0
    for action, number in history:
        live = [t for g in groups.values() for t in g.members if t.live]
        if action == "admit":
            groups[len(groups)] = make_group(len(groups))
            ledger.admit([groups[len(groups) - 1]])
        elif action == "flush":
            assert ledger.flush().balanced
        elif action == "reopen":
            ledger = reopen(ledger, path)
            groups |= {g.group_id: g for g in ledger.recover().groups}
        elif action == "train" and live:
            version += train(ledger, groups, live[number % len(live)], version)
        elif live:
            act(action, live[number % len(live)], number % 5)
            record = ledger.grow if action == "grow" else ledger.update
            record([live[number % len(live)]])
    ledger = reopen(ledger, path)
    expected = [queued_copy(g) for g in groups.values() if any(t.live for t in g.members)]
    assert ledger.recover().groups == expected
    trained = sum(t.state is State.TRAINED for g in groups.values() for t in g.members)
    assert ledger.accounting().trained == trained


def act(action: str, trajectory: Trajectory, number: int) -> None:
    if action == "lease":
        lease(trajectory)
    elif action == "grow" and trajectory.finish is None:
        grow(trajectory, number)
    elif action == "restart":
        restart(trajectory)
    elif action == "cut":
        trajectory.columns = trajectory.columns[:number]
    elif action == "complete":
        complete(trajectory)
    elif action == "reject":
        trajectory.state, trajectory.reason = State.REJECTED, "test"


def train(ledger: SqliteLedger, groups: dict[int, Group], trajectory: Trajectory, version: int) -> int:
    group = groups[trajectory.group_id]
    if any(t.state in TERMINAL for t in group.members):
        return 0
    ledger.commit_step(step_of(version + 1, group))
    for member in group.members:
        member.state, member.trained_version = State.TRAINED, version + 1
    return 1


def queued_copy(group: Group) -> Group:
    group = copy.deepcopy(group)
    for member in group.members:
        if member.state is State.LEASED:
            member.state, member.replica, member.epoch = State.QUEUED, "", 0
    return group
