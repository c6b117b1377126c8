"""Repack on demand, and admission while the newest weights are served."""

from hypothesis import given
from hypothesis import strategies as st

from millrace.schedule import GroupView, Move, ReplicaView, View
from millrace.schedule.admit import WhileNewest
from millrace.schedule.repack_demand import OnDemand, plan_demand, replicas_wanted


def replica(name, load, version=0, slots=8, **fields):
    return ReplicaView(
        name, version, running=min(load, slots), waiting=max(0, load - slots), slots=slots, **fields
    )


def view(*replicas, groups=(), newest=1, batch_groups=4):
    return View(
        version=newest,
        newest=newest,
        held=(newest,),
        steps_left=100,
        batch_groups=batch_groups,
        group_size=4,
        max_sequence_tokens=10,
        groups=tuple(groups),
        replicas=replicas,
    )


def test_the_least_loaded_moves_whole_onto_the_emptiest_other_one():
    moves = plan_demand([replica("a", 3), replica("b", 1), replica("c", 2)], wanted=1)
    assert moves == [Move("b", "c")]


def test_a_move_stays_within_half_of_the_destinations_slots_or_the_limit_given():
    loads = [replica("a", 3), replica("b", 2)]
    assert plan_demand(loads, wanted=1) == [], "2 + 3 exceeds 8 / 2"
    assert plan_demand(loads, wanted=1, trajectories_max=5) == [Move("b", "a")]


def test_no_more_replicas_are_emptied_than_wanted():
    loads = [replica(name, 1) for name in "abcdef"]
    assert len(plan_demand(loads, wanted=2)) == 2
    assert plan_demand(loads, wanted=0) == []


def test_versions_do_not_mix():
    assert plan_demand([replica("a", 1, version=0), replica("b", 1, version=1)], wanted=1) == []


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=12),
    st.integers(0, 6),
    st.integers(1, 12),
)
def test_any_plan_keeps_the_limit_and_never_fills_what_it_empties(loads, wanted, limit):
    replicas = [replica(f"r{i}", load, version) for i, (version, load) in enumerate(loads)]
    moves = plan_demand(replicas, wanted=wanted, trajectories_max=limit)
    by_name = {r.replica_id: r for r in replicas}
    sources, destinations = [m.source for m in moves], [m.destination for m in moves]
    assert len(moves) <= wanted
    assert len(set(sources)) == len(sources) and not set(sources) & set(destinations)
    for name in set(destinations):
        moved = [by_name[m.source] for m in moves if m.destination == name]
        assert by_name[name].load + sum(r.load for r in moved) <= limit
        assert all(r.version == by_name[name].version for r in moved)


def test_replicas_are_wanted_only_for_groups_that_the_others_cannot_start():
    behind = (replica("a", 2), replica("b", 3))
    assert replicas_wanted(view(*behind, replica("c", 0, version=1)), room=2) == 0, "c has two groups' slots"
    assert replicas_wanted(view(*behind), room=2) == 1
    assert replicas_wanted(view(*behind), room=5) == 3
    assert replicas_wanted(view(*behind), room=0) == 0


def test_nothing_moves_where_the_bound_leaves_no_room_for_new_groups():
    behind = (replica("a", 1), replica("b", 1))
    repack = OnDemand(interval_s=5, staleness_max=1)
    assert repack.moves(view(*behind)) == [Move("a", "b")]
    full = [GroupView(i, birth=1) for i in range(8)]
    assert repack.moves(view(*behind, groups=full)) == [], "(1 + 1) x 4 groups are live"


def test_replicas_on_the_newest_weights_and_busy_ones_are_left_alone():
    repack = OnDemand(interval_s=5, staleness_max=1)
    busy = replica("b", 1, busy_pulling=True, pulling_version=0)
    assert repack.moves(view(replica("a", 1), busy)) == []
    assert repack.moves(view(replica("a", 1, version=1), replica("b", 1, version=1))) == []


def test_groups_start_only_under_the_newest_weights_and_fill_the_slots():
    admit = WhileNewest()
    assert admit.room(view(), replica("a", 0, version=0)) == 0
    assert admit.room(view(), replica("a", 0, version=1)) == 2
    assert admit.room(view(), replica("a", 5, version=1)) == 1
    assert admit.room(view(), replica("a", 9, version=1)) == 0
