"""Redundancy, lengths and waits: what schedules do about the slowest of a batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from tests.unit.test_controller_state import NUMBERS, run_state

from millrace.config.tables.schedules import RollFlash, RollPacker
from millrace.config.tables.training import BatchShape
from millrace.controller import episode
from millrace.controller.group_ends import bring_back, late_waits, park
from millrace.controller.state.groups import GroupRecord
from millrace.controller.state.run_state import Parked
from millrace.controller.state.trajectories import REDUNDANT
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Finish, Group, Scored, State, Trajectory
from millrace.schedule.ahead import TailRounds, long_round
from millrace.schedule.deadlines import choose, overdue
from millrace.schedule.lengths import LongestFirst, PastLengths
from millrace.schedule.presets import rollpacker
from millrace.schedule.view import GroupView, QueuedView, ReplicaView, View
from millrace_sim.explore.worlds import small_config

SAMPLES, REDUNDANT_SAMPLES = 3, 2
NUMBERS_OF_FLASH = replace(
    NUMBERS, group_size=SAMPLES + REDUNDANT_SAMPLES, redundant_samples=REDUNDANT_SAMPLES
)


def adopted(states):
    """The state after a resume, of one group whose members are in these states."""
    members = [Trajectory(k, 0, lease=1) for k in range(len(states))]
    for member, state in zip(members, states, strict=True):
        member.state = state
        if state is not State.QUEUED:
            member.columns, member.finish = TokenColumns.of([5], [-1.0], 0), Finish.STOP
        member.reward = float(member.trajectory_id % 2) if state is State.SCORED else None
    state = run_state(NUMBERS_OF_FLASH, ["replica-0"])
    state.adopt(Group(0, "row-0", token_array([1, 2]), "text", members), birth=0)
    return state, members


def test_a_group_is_complete_with_its_first_scores_and_the_rest_ends():
    state, members = adopted([State.GENERATED, State.SCORED, State.QUEUED, State.SCORED, State.WAITING])
    assert not state.ended
    state.score(0, Scored(1.0))
    assert [m.state for m in members] == [
        State.BUFFERED, State.BUFFERED, State.REJECTED, State.BUFFERED, State.REJECTED,
    ]  # fmt: skip
    assert {m.reason for m in state.ended} == {REDUNDANT}
    assert not state.queued and state.num_ready == 1
    assert state.score(4, Scored(1.0)) is None, "a late reward changes nothing"


def test_a_resumed_run_ends_the_same_trajectories():
    _, members = adopted([State.SCORED, State.GENERATED, State.SCORED, State.SCORED, State.QUEUED])
    assert [m.trajectory_id for m in members if m.state is State.REJECTED] == [1, 4]


def test_failures_use_up_the_redundant_trajectories_first():
    state, members = adopted([State.FAILED, State.FAILED, State.SCORED, State.SCORED, State.GENERATED])
    assert state.num_ready == 0
    state.score(4, Scored(0.0))
    assert [m.state for m in members[2:]] == [State.BUFFERED] * 3


def view(*, version=0, births=(), ready=(), redundant=0, replicas=()):
    groups = tuple(GroupView(i, birth, i if i in ready else None) for i, birth in enumerate(births))
    return View(
        version=version,
        newest=version,
        pullable=(version,),
        steps_left=9,
        batch_groups=2,
        group_size=2,
        max_sequence_tokens=64,
        groups=groups,
        replicas=replicas,
        redundant_groups=redundant,
    )


def test_the_trainer_waits_for_no_redundant_group_and_it_ends_after_its_deadline():
    now = view(births=(0, 0, 0), ready=(1, 2), redundant=1)
    assert overdue(now, 0) == []
    assert [g.group_id for g in choose(now, 0, now.groups, now.groups[1:])] == [1, 2]
    assert overdue(view(version=1, births=(0,), redundant=1), 0) == [0]
    assert overdue(view(births=(0, 0, 0)), 0) == [2], "without redundancy it could not be trained in time"


def test_long_prompts_start_first_on_the_emptiest_replica_with_a_smaller_share():
    replicas = (ReplicaView("a", 3, running=4), ReplicaView("b", 3), ReplicaView("old", 2))
    pairs = [(0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "old")]
    lengths = [100.0, 600.0, 100.0, 100.0, 100.0]
    arranged = LongestFirst().pairs(view(replicas=replicas), pairs, lengths)
    assert arranged == [(1, "b"), (0, "a"), (2, "a"), (3, "a"), (4, "old")]
    equal = LongestFirst().pairs(view(replicas=replicas), pairs[:4], [None] * 4)
    assert sorted(name for _, name in equal) == ["a", "a", "b", "b"]
    assert sorted(index for index, _ in equal) == [0, 1, 2, 3]


def test_the_predicted_length_follows_the_newest_groups_of_a_row():
    lengths = PastLengths()
    assert lengths.predicted("row") is None
    lengths.learn("row", [100, 200])
    assert lengths.predicted("row") == 150
    lengths.learn("row", [250])
    assert lengths.predicted("row") == 200


def test_of_more_rows_than_fit_the_lengths_learned_longest_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr("millrace.schedule.lengths.ROWS_MAX", 2)
    lengths = PastLengths()
    for row in ("a", "b", "a", "c"):
        lengths.learn(row, [100])
    assert [lengths.predicted(row) for row in "abc"] == [100, None, 100]


def test_only_what_waits_for_an_environment_is_late():
    def record(group_id, state, started_s):
        member = Trajectory(group_id, group_id, state=state)
        return GroupRecord(Group(group_id, "row", token_array([1]), "", [member]), 0, 0, started_s)

    groups = [record(0, State.WAITING, 1.0), record(1, State.LEASED, 1.0), record(2, State.WAITING, 9.0)]
    groups.append(record(3, State.WAITING, None))
    assert [t.group_id for t in late_waits(groups, 11.0, 10.0, session_s=2.0)] == [0]
    assert [t.group_id for t in late_waits(groups, 12.0, 10.0, session_s=2.0)] == [0, 3]
    assert late_waits(groups, 99.0, None, session_s=2.0) == []


def test_a_later_turn_needs_the_version_of_its_trajectory_if_versions_never_mix():
    trajectory = Trajectory(0, 0, columns=TokenColumns.of([5, 6], [-1.0, -1.0], 4))
    trajectory.columns.observe(token_array([7]))
    assert episode.queued_view(trajectory, 2, {}, one_version=False) == QueuedView(None, 4, tokens=3)
    assert episode.queued_view(trajectory, 2, {}, one_version=True) == QueuedView(4, 4, tokens=3)
    assert episode.restart(trajectory, one_version=False) == 0
    assert episode.restart(trajectory, one_version=True) == 3
    assert not trajectory.columns


def test_screening_and_redundant_samples_are_refused_together():
    batch = BatchShape(group_size=4, screen_samples=2)
    with pytest.raises(ValueError, match=r"screen_samples` \(2\) waits .*redundant_samples` \(1\)"):
        small_config(RollFlash(), batch=batch)


def test_parked_groups_make_a_round_of_their_own_once_they_are_a_batch():
    def look(parked, returned=0, live=0):
        return msgspec.structs.replace(view(births=(0,) * live), parked=parked, returned=returned)

    longs = [look(2), look(3), look(1, returned=1, live=1), look(0, returned=2, live=2)]
    assert all(long_round(one) for one in longs)
    shorts = [look(1), look(2, live=1), look(2, returned=1, live=2), look(0, returned=1, live=1)]
    assert not any(long_round(one) for one in shorts)
    rounds = TailRounds(redundant=3)
    assert [rounds.wanted_groups_max(one) for one in (longs[0], shorts[0])] == [2, 5]


def test_a_parked_group_waits_until_no_reward_worker_is_busy_with_it():
    parked, group = Parked(), Group(4, "row", token_array([1]), "", [Trajectory(8, 4), Trajectory(9, 4)])
    parked.add(group, [9])
    assert parked.ready == []
    parked.answered(9)
    assert parked.ready == [group]
    parked.begin_again(group, {4})
    assert parked.num_returned({4, 5}, ()) == 1 and parked.num_returned({4}, (4,)) == 0
    assert parked.ready == [] == parked.clear()


def test_a_parked_group_waits_for_no_answer_to_a_member_that_has_ended():
    state, members = adopted([State.GENERATED] * (SAMPLES + REDUNDANT_SAMPLES))
    park(SimpleNamespace(state=state, events=SimpleNamespace(emit=lambda kind, **fields: None)), 0)
    assert episode.answered(members) == [3, 4], "their requests are forgotten"
    for trajectory_id in range(SAMPLES):
        assert state.parked.ready == []
        state.parked.answered(trajectory_id)
    assert [group.group_id for group in state.parked.ready] == [0]


def test_a_group_that_begins_again_is_as_old_as_its_replica_whatever_its_ended_members_had():
    state, members = adopted([State.SCORED, State.SCORED, State.SCORED, State.GENERATED, State.REJECTED])
    assert state.num_ready == 1 and members[4].columns
    discarded = []
    events = SimpleNamespace(emit=lambda kind, **fields: discarded.append(fields["discarded_tokens"]))
    run = SimpleNamespace(state=state, events=events)
    park(run, 0)
    assert state.num_ready == 0 and not state.groups and not state.trajectories and not state.queued
    assert discarded == [1, 1, 1] and all(not m.columns and m.reward is None for m in members[:3])
    state.replicas["replica-0"].version = 3
    ((replica, works),) = bring_back(run, ["replica-0"])
    assert replica == "replica-0" and len(works) == SAMPLES
    assert state.groups[0].birth == 3
    assert all(m.state is State.LEASED for m in members[:3])


def test_the_preset_starts_a_quarter_more_groups_unless_it_is_configured():
    assert rollpacker(RollPacker(), 8).redundant_groups == 2
    assert rollpacker(RollPacker(redundant_groups=5), 8).ahead_rule == TailRounds(5)
