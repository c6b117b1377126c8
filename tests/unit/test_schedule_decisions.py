"""Single decisions, worked by hand."""

from dataclasses import replace

import msgspec
import pytest

from millrace.schedule import GroupView, QueuedView, RefreshOrder, ReplicaView, View, presets
from millrace.schedule.repack import BestFit

SYNCHRONOUS = presets.synchronous()
LLAMARL = presets.llamarl(lag=2, iteration_tokens=32)
AREAL = presets.areal(eta=2)
RLAX = presets.rlax(reload_staleness=1, acceptance_staleness=3)
LAMINAR = presets.laminar(
    staleness_max=4, round_groups=2, batch_max=None, repack=BestFit(interval_s=5, kv_fraction_max=0.9)
)
ALL = [SYNCHRONOUS, LLAMARL, AREAL, RLAX, LAMINAR]


def replica(name="a", version=3, **fields):
    return ReplicaView(name, version, **{"slots": 8, "kv_capacity_tokens": 8 * 16, **fields})


def view(
    *replicas,
    groups=(),
    version=3,
    newest=None,
    pullable=None,
    steps_left=100,
    versions_queued=(),
    batch_groups=4,
):
    newest = version if newest is None else newest
    return View(
        version=version,
        newest=newest,
        pullable=tuple(range(max(0, newest - 2), newest + 1)) if pullable is None else pullable,
        steps_left=steps_left,
        batch_groups=batch_groups,
        group_size=2,
        max_sequence_tokens=16,
        groups=tuple(groups),
        replicas=replicas,
        versions_queued=versions_queued,
    )


def ready(count, birth=3, first=0):
    return [GroupView(first + i, birth, i) for i in range(count)]


# ---------------------------------------------------------------- admit and route


def test_a_synchronous_batch_starts_at_once_spread_over_the_replicas_in_their_order():
    assert SYNCHRONOUS.admit(view(replica("a"), replica("b"))) == ["a", "b", "a", "b"]


def test_a_replica_that_is_taking_new_weights_keeps_its_share_of_the_batch():
    pulling = replica("b", 2, busy=True, pulling_version=3)
    assert SYNCHRONOUS.admit(view(replica("a"), pulling)) == ["a", "a"]


def test_no_round_begins_under_weights_that_newer_ones_follow_in_a_moment():
    assert LAMINAR.admit(view(replica(version=2), version=3, newest=2)) == ["a", "a"]
    assert LAMINAR.admit(view(replica(version=2, staging_version=3), version=3, newest=2)) == []
    begun = replica(version=2, staging_version=3, groups_since_swap=1, running=2)
    assert LAMINAR.admit(view(begun, version=3, newest=2)) == ["a"]


def test_a_replica_that_has_to_refresh_first_gets_nothing_in_the_same_view():
    assert SYNCHRONOUS.admit(view(replica("a", 2))) == []
    assert AREAL.admit(view(replica("a", 2))) == []


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
def test_nothing_starts_on_busy_replicas_or_before_the_first_weights(schedule):
    assert schedule.admit(view(replica("a", -1), replica("b", busy=True))) == []


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
def test_never_more_groups_than_the_remaining_steps_consume(schedule):
    assert len(schedule.admit(view(replica(), steps_left=1, groups=ready(2), batch_groups=4))) == 2
    assert schedule.admit(view(replica(), steps_left=0)) == []


def test_while_a_batch_is_trained_only_an_asynchronous_schedule_goes_on():
    # The batch of version 3 was taken: the next one is for version 4, weights are still 3.
    training = view(replica(), version=4, newest=3)
    assert SYNCHRONOUS.admit(training) == []
    assert len(presets.llamarl(lag=1, iteration_tokens=1).admit(training)) == 4


def test_areal_admits_by_its_formula_up_to_two_rounds_of_slots():
    # Version 3, eta 2, B 4: N_r - B i <= B (eta + 1) = 12 live groups; 2 x 8 slots hold 8 groups of 2.
    assert len(AREAL.admit(view(replica(), groups=ready(5)))) == 7
    assert len(AREAL.admit(view(replica()))) == 8


def test_the_least_loaded_replica_by_slots_comes_first():
    big = replica("big", slots=16, running=8)
    assert AREAL.admit(view(replica("small", running=5), big, groups=ready(11))) == ["big"]


def test_a_replica_too_old_for_the_bound_starts_nothing_while_others_do():
    old = replica("old", 0, running=2)
    assert LAMINAR.admit(view(old, replica("new", 6), version=6)) == ["new", "new"]


def test_laminar_starts_a_round_of_groups_and_no_more_until_the_replica_is_empty():
    assert LAMINAR.admit(view(replica())) == ["a", "a"]
    assert LAMINAR.admit(view(replica(running=2, groups_since_swap=1))) == ["a"]
    assert LAMINAR.admit(view(replica(running=1, groups_since_swap=2))) == []
    assert LAMINAR.admit(view(replica(groups_since_swap=2))) == ["a", "a"]


def test_laminar_finishes_a_round_under_old_weights_but_begins_none():
    assert LAMINAR.admit(view(replica(version=2, running=1, groups_since_swap=1))) == ["a"]
    assert LAMINAR.admit(view(replica(version=2, running=1, groups_since_swap=0))) == []


def test_laminar_counts_waiting_trajectories_with_all_they_may_need():
    # 128 tokens; 60 used and 2 x 16 promised leave 36: one group of 2 x 16.
    crowded = replica(running=3, waiting=2, kv_used_tokens=60)
    assert LAMINAR.admit(view(crowded)) == ["a"]
    assert LAMINAR.admit(view(msgspec.structs.replace(crowded, kv_used_tokens=65))) == []


def test_an_idle_replica_starts_a_group_even_if_that_may_not_fit_its_cache():
    assert LAMINAR.admit(view(replica(kv_capacity_tokens=20))) == ["a"]


def test_without_a_bound_live_groups_are_limited_to_twice_the_slots():
    unbounded = replace(LAMINAR, staleness_max=None)
    assert unbounded.admit(view(replica(), groups=ready(7, birth=0))) == ["a"]
    assert unbounded.admit(view(replica(), groups=ready(8, birth=0))) == []


# ---------------------------------------------------------------- refresh


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
def test_a_fresh_replica_pulls_the_newest_version(schedule):
    assert schedule.refresh(view(replica(version=-1))) == [RefreshOrder("a", 3)]
    assert schedule.refresh(view(replica(version=-1), version=0, newest=-1)) == []


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
def test_an_empty_replica_takes_newer_weights_and_a_busy_one_is_left_alone(schedule):
    assert schedule.refresh(view(replica(version=2))) == [RefreshOrder("a", 3)]
    assert schedule.refresh(view(replica(version=2, busy=True))) == []
    assert schedule.refresh(view(replica(version=4))) == []


def test_synchronous_and_laminar_replicas_finish_what_they_have_before_they_refresh():
    for schedule in (SYNCHRONOUS, LAMINAR):
        assert schedule.refresh(view(replica(version=2, running=1))) == []


def test_llamarl_refreshes_between_iterations_with_trajectories_in_flight():
    assert LLAMARL.refresh(view(replica(version=2, running=1, steps_since_swap=31))) == []
    due = view(replica(version=2, running=1, steps_since_swap=32))
    assert LLAMARL.refresh(due) == [RefreshOrder("a", 3, discard=False)]


def test_areal_refreshes_at_once():
    assert AREAL.refresh(view(replica(version=2, running=1))) == [RefreshOrder("a", 3, discard=False)]


def test_rlax_discards_partials_once_it_is_further_behind_than_the_reload_staleness():
    assert RLAX.refresh(view(replica(version=2, running=1))) == []
    assert RLAX.refresh(view(replica(version=1, running=1))) == [RefreshOrder("a", 3, discard=True)]


# ---------------------------------------------------------------- lost trajectories


def test_an_empty_replica_takes_the_version_of_lost_trajectories_that_nobody_serves():
    look = view(replica("a", running=1), replica("b", -1), versions_queued=(2,))
    assert LAMINAR.refresh(look) == [RefreshOrder("b", 2)]
    assert LAMINAR.restart(look) == []


def test_one_replica_is_enough_for_a_lost_version():
    look = view(replica("a", -1), replica("b"), versions_queued=(2,))
    assert LAMINAR.refresh(look) == [RefreshOrder("a", 2)]
    under_way = view(replica("a", -1, busy=True, pulling_version=2), replica("b"), versions_queued=(2,))
    assert LAMINAR.refresh(under_way) == []


def test_a_replica_in_the_middle_of_a_move_still_counts_as_serving_its_version():
    look = view(replica("a", 2, busy=True, running=1), replica("b", -1), versions_queued=(2,))
    assert LAMINAR.refresh(look) == [RefreshOrder("b", 3)]
    assert LAMINAR.restart(look) == []


def test_an_empty_replica_that_serves_a_lost_version_waits_for_its_trajectories():
    look = view(replica("a", 2), versions_queued=(2,))
    assert LAMINAR.refresh(look) == []
    assert LAMINAR.place(look, [QueuedView(2, 2)]) == ["a"]


def test_one_replica_ends_the_trajectories_of_one_version_before_it_goes_to_another():
    both = view(replica("a", 2), versions_queued=(1, 2))
    assert LAMINAR.refresh(both) == []
    assert LAMINAR.place(both, [QueuedView(1, 1), QueuedView(2, 2)]) == [None, "a"]
    assert LAMINAR.refresh(view(replica("a", 2), versions_queued=(1,))) == [RefreshOrder("a", 1)]


def test_a_lost_version_that_is_neither_served_nor_held_is_lost_for_good():
    look = view(replica("a"), versions_queued=(0, 3), pullable=(2, 3))
    assert LAMINAR.restart(look) == [0]
    assert AREAL.restart(look) == []


def test_a_lost_version_that_rlax_would_reload_from_at_once_is_not_rescued():
    look = view(replica("a", -1), versions_queued=(1,))
    assert RLAX.refresh(look) == [RefreshOrder("a", 3)]
    assert RLAX.restart(look) == [1]


def test_one_version_schedules_place_partial_tokens_on_the_same_version_only():
    look = view(replica("a", 2, running=4), replica("b", 2), replica("c", 3))
    assert LAMINAR.place(look, [QueuedView(2, 2)]) == ["b"]
    assert LAMINAR.place(look, [QueuedView(1, 1)]) == [None]


def test_mixing_schedules_place_partial_tokens_on_the_newest_that_is_not_older():
    look = view(replica("a", 2), replica("b", 3, running=4), replica("c", 3, busy=True))
    assert AREAL.place(look, [QueuedView(2, 2)]) == ["b"]
    assert AREAL.place(look, [QueuedView(4, 2)]) == [None]


def test_each_placed_trajectory_counts_as_load_for_the_next():
    look = view(replica("a", 2, running=6), replica("b", 2, running=7))
    queued = [QueuedView(2, 2), QueuedView(1, 1), *[QueuedView(2, 2)] * 4]
    assert LAMINAR.place(look, queued) == ["a", None, "a", "b", "a", "b"]


def test_free_slots_come_before_newer_weights():
    assert AREAL.place(view(replica("a", 2), replica("b", 3, running=8)), [QueuedView(2, 2)]) == ["a"]


def test_without_tokens_no_replica_older_than_the_groups_birth_is_taken():
    look = view(replica("a", 2))
    assert LAMINAR.place(look, [QueuedView(None, 3)]) == [None]
    assert LAMINAR.place(look, [QueuedView(None, 2)]) == ["a"]


# ---------------------------------------------------------------- take


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
def test_a_batch_waits_until_it_is_whole_and_comes_in_the_order_of_group_ids(schedule):
    assert schedule.take(view(groups=ready(3))) is None
    shuffled = [GroupView(i, 3, rank) for i, rank in ((7, 2), (5, 3), (6, 0), (4, 1))]
    assert schedule.take(view(groups=shuffled)) == [4, 5, 6, 7]
    assert schedule.take(view(groups=ready(4), steps_left=0)) is None


def test_first_ready_is_first_trained_and_oldest_is_first_in_areal():
    groups = [GroupView(0, 3, 5), GroupView(1, 2, 4), *ready(4, first=2)]
    assert LLAMARL.take(view(groups=groups)) == [2, 3, 4, 5]
    assert AREAL.take(view(groups=groups)) == [0, 1, 2, 3]


def test_a_group_at_its_deadline_goes_before_those_that_were_ready_earlier():
    groups = [*ready(5), GroupView(9, 1, 99)]  # bound 2: group 9 has to be trained at 3
    assert LLAMARL.take(view(groups=groups)) == [0, 1, 2, 9]


def test_the_batch_waits_for_a_straggler_at_its_deadline():
    groups = [*ready(5), GroupView(9, 1)]
    assert LLAMARL.take(view(groups=groups)) is None
    assert replace(LLAMARL, staleness_max=3).take(view(groups=groups)) == [0, 1, 2, 3]


def test_a_group_beyond_the_bound_is_overdue_and_does_not_hold_up_the_others():
    groups = [*ready(4), GroupView(9, 0)]
    assert LLAMARL.expire(view(groups=groups)) == [9]
    assert LLAMARL.take(view(groups=groups)) == [0, 1, 2, 3]
    assert replace(LLAMARL, staleness_max=None).expire(view(groups=groups)) == []
