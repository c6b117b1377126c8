"""Repack: worked by hand, then its guarantees on random replicas."""

from hypothesis import given
from hypothesis import strategies as st

from millrace.schedule.repack import BestFit, plan
from millrace.schedule.view import RepackOrder, ReplicaView


def replica(name, kv, load, *, previous=10_000, version=3, busy=False, capacity=100, slots=8):
    return ReplicaView(
        replica_id=name,
        version=version,
        busy=busy,
        running=load,
        slots=slots,
        kv_used_tokens=kv,
        kv_used_tokens_previous=previous,
        kv_capacity_tokens=capacity,
    )


def moves(*replicas, fraction=0.9, batch_max=None):
    planned = plan(replicas, kv_max_tokens_fraction=fraction, batch_max=batch_max)
    return [(move.source, *move.shares) for move in planned]


def test_a_small_replica_moves_onto_the_fullest_that_still_fits():
    # C_max 90. a (10) fits b (30 -> 40) and c (70 -> 80), not d (85 -> 95): the fullest is c.
    # b (30) fits neither c (80 + 30) nor d (85 + 30): it stays.
    assert moves(replica("a", 10, 1), replica("b", 30, 2), replica("c", 70, 3), replica("d", 85, 3)) == [
        ("a", "c")
    ]


def test_planned_load_counts_for_both_limits():
    # a (10) -> d (60 -> 70); b (15) -> d (70 -> 85); c (20) would make d 105: it goes nowhere,
    # since a and b are empty by then.
    assert moves(replica("a", 10, 1), replica("b", 15, 1), replica("c", 20, 1), replica("d", 60, 1)) == [
        ("a", "d"),
        ("b", "d"),
    ]
    # The same by trajectories: B = 4, d holds 2; after a it holds 3, after b 4, so c has to stay.
    four = [replica(name, kv, 1) for name, kv in (("a", 5), ("b", 6), ("c", 7))] + [replica("d", 8, 2)]
    assert moves(*four, batch_max=4) == [("a", "d"), ("b", "d")]


def test_a_replica_that_received_is_not_emptied():
    # a -> b (20 -> 30) although c is fuller (c lacks slots); then b received and stays, c (40) fits b.
    a, b, c = replica("a", 10, 2), replica("b", 20, 1), replica("c", 40, 7)
    assert moves(a, b, c) == [("a", "b")]


def test_only_replicas_of_the_same_version_are_joined():
    assert moves(replica("a", 10, 1, version=3), replica("b", 20, 1, version=4)) == []


def test_a_replica_that_is_ramping_up_takes_no_part():
    assert moves(replica("a", 10, 1, previous=10), replica("b", 20, 1)) == []
    assert moves(replica("a", 10, 1), replica("b", 20, 1, previous=15)) == []


def test_busy_empty_and_full_replicas_take_no_part():
    full = replica("c", 30, 8)
    assert moves(replica("a", 10, 1, busy=True), replica("b", 0, 0), full, replica("d", 20, 1)) == []


def test_replicas_of_different_size_have_their_own_limits():
    # b may hold 45 of 50, so a (30) does not fit onto it; b (20) fits onto a (30 + 20 <= 90).
    assert moves(replica("a", 30, 1), replica("b", 20, 1, capacity=50)) == [("b", "a")]


def test_the_rule_reads_the_view_of_all_replicas():
    rule = BestFit(interval_s=5, kv_fraction_max=0.9)
    assert "5 s" in rule.describe()
    pair = [replica("a", 10, 1), replica("b", 20, 1)]
    assert plan(pair, kv_max_tokens_fraction=0.9, batch_max=None) == [RepackOrder("a", {"b": 1})]


fleets = st.lists(
    st.builds(
        dict,
        kv=st.integers(0, 100),
        load=st.integers(0, 8),
        previous=st.integers(0, 100),
        version=st.integers(-1, 2),
        busy=st.booleans(),
        capacity=st.sampled_from([60, 100]),
        slots=st.sampled_from([4, 8]),
    ),
    max_size=14,
)


@given(fleets, st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([None, 3, 6]))
def test_every_plan_keeps_the_guarantees(fleet, fraction, batch_max):
    replicas = {f"r{i}": replica(f"r{i}", **fields) for i, fields in enumerate(fleet)}
    planned = plan(replicas.values(), kv_max_tokens_fraction=fraction, batch_max=batch_max)
    sources = [move.source for move in planned]
    destinations = {name for move in planned for name in move.shares}
    assert len(set(sources)) == len(sources)
    assert not destinations & set(sources)
    kv = {name: r.kv_used_tokens for name, r in replicas.items()}
    load = {name: r.load for name, r in replicas.items()}
    for move in planned:
        (name,) = move.shares
        source, destination = replicas[move.source], replicas[name]
        assert move.shares == {name: source.load}
        assert source.version == destination.version >= 0
        for end in (source, destination):
            assert not end.busy and end.load > 0
            assert end.kv_used_tokens < end.kv_used_tokens_previous, "ramping up"
        kv[name] += kv.pop(move.source)
        load[name] += load.pop(move.source)
    for name in destinations:
        assert kv[name] <= fraction * replicas[name].kv_capacity_tokens
        assert load[name] <= (batch_max or replicas[name].slots)
    assert sum(load.values()) == sum(r.load for r in replicas.values())
    assert len(kv) == len(replicas) - len(planned)


@given(fleets)
def test_planning_again_after_the_moves_finds_nothing_more_for_the_emptied(fleet):
    replicas = [replica(f"r{i}", **fields) for i, fields in enumerate(fleet)]
    planned = plan(replicas, kv_max_tokens_fraction=0.9, batch_max=None)
    emptied = {move.source for move in planned}
    rest = [r for r in replicas if r.replica_id not in emptied]
    again = plan(rest, kv_max_tokens_fraction=0.9, batch_max=None)
    assert not emptied & {end for move in again for end in (move.source, *move.shares)}
