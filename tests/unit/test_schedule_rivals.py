"""The decisions of the presets `staleflow` and `heddle`."""

from msgspec.structs import replace

from millrace.config.tables.schedules import Heddle, StaleFlow
from millrace.schedule.heddle import Presorted, run_sizes
from millrace.schedule.presets import Waterfall, build_tail
from millrace.schedule.view import GroupView, QueuedView, ReplicaView, View

STALEFLOW, HEDDLE = build_tail(StaleFlow(staleness_max=1)), build_tail(Heddle())


def replica(name, version=3, running=0, kv=0, slots=16):
    return ReplicaView(
        name, version, running=running, slots=slots, kv_used_tokens=kv, kv_capacity_tokens=1600
    )


def look(*replicas, births=(), version=3):
    return View(
        version=version,
        newest=max((r.version for r in replicas), default=version),
        pullable=(2, 3, 4),
        steps_left=9,
        batch_groups=4,
        group_size=2,
        max_sequence_tokens=100,
        groups=tuple(GroupView(i, birth) for i, birth in enumerate(births)),
        replicas=replicas,
    )


def test_the_gain_of_a_trajectory_is_of_the_papers_formula():
    # T(0) = 0, T(1) = 1 / (2 x 25 / 1600 + 1) for an idle replica: all of the ideal.
    waterfall, idle = Waterfall(0.1), replica("a")
    assert waterfall.gain(look(idle), idle, 0) == 1.0
    # 8 with 800 tokens: T = 8 / 2. One more with 100: T = 9 / 2.125. Ideal: 1 / 1.125.
    half = replica("b", running=8, kv=800)
    assert abs(waterfall.gain(look(half), half, 8) - (9 / 2.125 - 8 / 2) * 1.125) < 1e-12


def test_groups_stop_where_throughput_hardly_rises_and_at_the_slots():
    full = replica("a", running=10, kv=1500)
    assert Waterfall(0.2).groups(look(full), full) == 0
    assert Waterfall(0.1).groups(look(replica("b")), replica("b")) == 8  # 16 slots, groups of 2
    assert Waterfall(0.9).groups(look(replica("b")), replica("b")) == 1


def test_staleflow_fills_the_replica_whose_throughput_rises_most():
    busy, idle = replica("busy", running=8, kv=800), replica("idle")
    assert STALEFLOW.admit(look(busy, idle)) == ["idle"] * 8  # the bound has no more
    assert "busy" in STALEFLOW.admit(look(busy, replace(idle, slots=8)))


def test_staleflow_takes_new_weights_where_they_let_more_groups_start():
    # Under the bound 1, 8 live groups of birth 3 leave no place at version 3; at 4 there are 4.
    behind, newest = replica("a", running=4, kv=200), replica("b", version=4, running=16)
    pays = look(behind, newest, births=[3] * 8)
    assert [order.replica_id for order in STALEFLOW.refresh(pays)] == ["a"]
    crowded = replace(behind, running=16, kv_used_tokens=1600)
    assert not STALEFLOW.refresh(look(crowded, newest, births=[3] * 8)), "it has no room for them"


def test_heddles_runs_are_those_with_the_earliest_end():
    # On 16 slots: 8 alone with 2 trajectories takes 8 x 1.125 = 9; the six of 4 then take 4 x 1.75 = 7.
    hosts = [replica("a"), replica("b")]
    assert run_sizes([8, 4, 4, 4, 4, 4, 4], hosts, 2) == [1, 6]
    assert run_sizes([5] * 6, hosts, 2) == [3, 3]
    assert run_sizes([], hosts, 2) == [0, 0]


def test_heddle_places_each_prompt_once_and_long_ones_on_the_emptiest_replica():
    hosts = look(replica("a", running=4), replica("b"))
    pairs = [(index, "ab"[index % 2]) for index in range(6)]
    arranged = Presorted().pairs(hosts, pairs, [10, None, 90, 10, 10, 10])
    assert sorted(index for index, _ in arranged) == list(range(6))
    assert arranged[0] == (2, "b")


def test_heddle_places_the_longest_trajectory_first():
    full = look(replica("b", running=16), replica("a", running=15))
    short, long = QueuedView(None, 3, tokens=5), QueuedView(None, 3, tokens=50)
    assert HEDDLE.place(full, [short, long]) == ["b", "a"]  # the last free slot is for the long one


def test_a_turn_leaves_a_crowded_home_while_its_environment_answers():
    turn = QueuedView(None, 3, "a", tokens=5)
    assert HEDDLE.place(look(replica("a", running=9), replica("b", running=1)), [turn]) == ["b"]
    assert HEDDLE.place(look(replica("a", running=9), replica("b", running=5)), [turn]) == ["a"]


class Counted(int):
    """A load that counts how often it is compared."""

    num = 0

    def __add__(self, other):
        return Counted(int(self) + other)

    def __lt__(self, other):
        Counted.num += 1
        return int(self) < other


def test_a_crowd_of_turns_on_many_replicas_costs_no_product_of_both():
    num = 256
    replicas = [replica(f"r{i}", running=Counted(i % 7), slots=64) for i in range(num)]
    turns = [QueuedView(None, 3, home=f"r{i % 5}", tokens=i) for i in range(num)]
    placed = HEDDLE.place(look(*replicas), turns)
    assert len(set(placed)) > num / 8, "they leave the five crowded homes"
    assert Counted.num < 32 * num
