"""Repack on demand, and admission while the newest weights are served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.schedule import GroupView, RepackOrder, ReplicaView, View
from millrace.schedule.admit import WhileNewest
from millrace.schedule.ahead import Ahead
from millrace.schedule.repack import PACKED_MAX, OnDemand, plan_demand, replicas_wanted


def replica(name, load, version=0, slots=8, kv_capacity_tokens=80, **fields):
    return ReplicaView(
        name,
        version,
        running=min(load, slots),
        waiting=max(0, load - slots),
        slots=slots,
        kv_capacity_tokens=kv_capacity_tokens,
        **fields,
    )


def view(*replicas, groups=(), newest=1, batch_groups=4):
    return View(
        version=newest,
        newest=newest,
        pullable=(newest,),
        steps_left=100,
        batch_groups=batch_groups,
        group_size=4,
        max_sequence_tokens=10,
        groups=tuple(groups),
        replicas=replicas,
    )


def planned(replicas, *, wanted, limit):
    return plan_demand(replicas, [limit] * len(replicas), wanted=wanted)


def test_the_least_loaded_moves_onto_the_emptiest_others():
    assert planned([replica("a", 3), replica("b", 1), replica("c", 2)], wanted=1, limit=8) == [
        RepackOrder("b", {"c": 1})
    ]
    # b (2) goes to c (2 -> 3), then to whichever of c and a (3) comes first.
    assert planned([replica("a", 3), replica("b", 2), replica("c", 2)], wanted=1, limit=8) == [
        RepackOrder("b", {"c": 1, "a": 1})
    ]


def test_a_replica_that_fits_nowhere_as_a_whole_is_spread():
    loads = [replica("a", 4), replica("b", 3), replica("c", 4)]
    assert planned(loads, wanted=1, limit=6) == [RepackOrder("b", {"a": 2, "c": 1})]
    assert planned(loads, wanted=1, limit=5) == [], "three do not fit into two places"
    assert plan_demand(loads, [4, 6, 7], wanted=1) == [RepackOrder("b", {"c": 3})], "each has its own limit"


def test_a_move_stays_within_the_limit():
    loads = [replica("a", 3), replica("b", 2)]
    assert planned(loads, wanted=1, limit=4) == []
    assert planned(loads, wanted=1, limit=5) == [RepackOrder("b", {"a": 2})]


@pytest.mark.parametrize(
    ("slots", "kv", "limit"), [(8, 80, 8), (8, 50, 5), (8, 5, 1), (100, 1000, PACKED_MAX)]
)
def test_the_limit_is_what_a_replica_surely_runs_and_not_more_than_packs_well(slots, kv, limit):
    repack = OnDemand(interval_s=5, ahead=Ahead(1))
    for load in (1, limit // 2, limit // 2 + 1):
        pair = [replica(name, load, slots=slots, kv_capacity_tokens=kv) for name in "ab"]
        assert bool(repack.moves(view(*pair, batch_groups=200))) is (0 < 2 * load <= limit)


def test_a_limit_that_is_given_is_the_limit():
    pair = [replica(name, 3, kv_capacity_tokens=5) for name in "ab"]
    assert OnDemand(5, Ahead(1), batch_max=6).moves(view(*pair)) == [RepackOrder("a", {"b": 3})]
    assert OnDemand(5, Ahead(1), batch_max=5).moves(view(*pair)) == []


def test_no_more_replicas_are_emptied_than_wanted():
    loads = [replica(name, 1) for name in "abcdef"]
    assert len(planned(loads, wanted=2, limit=8)) == 2
    assert planned(loads, wanted=0, limit=8) == []


def test_versions_do_not_mix():
    apart = [replica("a", 1, version=0), replica("b", 1, version=1)]
    assert planned(apart, wanted=1, limit=8) == []


fleets = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 12)), max_size=12)


@given(fleets, st.integers(0, 6))
def test_any_plan_keeps_the_limits_and_never_fills_what_it_empties(fleet, wanted):
    replicas = {f"r{i}": replica(f"r{i}", load, version) for i, (version, load, _) in enumerate(fleet)}
    limits = {f"r{i}": limit for i, (_, _, limit) in enumerate(fleet)}
    moves = plan_demand(list(replicas.values()), list(limits.values()), wanted=wanted)
    load = {name: r.load for name, r in replicas.items()}
    sources = {move.source for move in moves}
    destinations = {name for move in moves for name in move.shares}
    assert len(moves) == len(sources) <= wanted
    assert not sources & destinations
    for move in moves:
        assert sum(move.shares.values()) == load.pop(move.source) > 0
        for name, num in move.shares.items():
            assert replicas[name].version == replicas[move.source].version
            assert replicas[name].load > 0 < num
            load[name] += num
    assert all(load[name] <= limits[name] for name in destinations)


@given(fleets)
def test_one_more_is_emptied_as_long_as_the_others_have_room(fleet):
    replicas = [replica(f"r{i}", load, version) for i, (version, load, _) in enumerate(fleet)]
    moves = plan_demand(replicas, [limit for _, _, limit in fleet], wanted=1)
    live = [(r, max(0, limit - r.load)) for r, (_, _, limit) in zip(replicas, fleet, strict=True) if r.load]
    possible = [
        r.replica_id
        for r, _ in live
        if r.load <= sum(room for other, room in live if other is not r and other.version == r.version)
    ]
    assert [move.source for move in moves] == sorted(possible, key=lambda i: replicas[int(i[1:])].load)[:1]


def test_replicas_are_wanted_only_for_groups_that_the_others_cannot_start():
    behind = (replica("a", 2), replica("b", 3))
    assert replicas_wanted(view(*behind, replica("c", 0, version=1)), room=2) == 0, "c has two groups' slots"
    assert replicas_wanted(view(*behind), room=2) == 1
    assert replicas_wanted(view(*behind), room=5) == 3
    assert replicas_wanted(view(*behind), room=0) == 0


def test_nothing_moves_where_the_bound_leaves_no_room_for_new_groups():
    behind = (replica("a", 1), replica("b", 1))
    repack = OnDemand(interval_s=5, ahead=Ahead(1))
    assert repack.moves(view(*behind)) == [RepackOrder("a", {"b": 1})]
    full = [GroupView(i, birth=1) for i in range(8)]
    assert repack.moves(view(*behind, groups=full)) == [], "(1 + 1) x 4 groups are live"


def test_replicas_on_the_newest_weights_and_busy_ones_are_left_alone():
    repack = OnDemand(interval_s=5, ahead=Ahead(1))
    busy = replica("b", 1, busy=True, pulling_version=0)
    assert repack.moves(view(replica("a", 1), busy)) == []
    assert repack.moves(view(replica("a", 1, version=1), replica("b", 1, version=1))) == []


def test_groups_start_only_under_the_newest_weights_and_half_a_group_waits_for_slots():
    admit = WhileNewest()
    assert admit.room(view(), replica("a", 0, version=0)) == 0
    assert admit.room(view(), replica("a", 0, version=1)) == 2  # KV room
    assert admit.room(view(), replica("a", 6, version=1)) == 1
    assert admit.room(view(), replica("a", 10, version=1)) == 0


def test_kv_that_running_trajectories_hold_leaves_less_room_for_groups():
    admit = WhileNewest()
    # A group may need 4 x 10 tokens; an idle replica starts one whatever its size.
    assert admit.room(view(), replica("a", 1, version=1, kv_used_tokens=30)) == 1
    assert admit.room(view(), replica("a", 1, version=1, kv_used_tokens=50)) == 0
    assert admit.room(view(), replica("a", 0, version=1, kv_capacity_tokens=20)) == 1
