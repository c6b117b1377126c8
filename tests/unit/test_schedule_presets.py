"""From configuration to schedule, and what a schedule says of itself."""

import pytest
from msgspec.structs import replace

from millrace.checks.derived import explain
from millrace.config.schema import Config
from millrace.schedule import build
from millrace.schedule.admit import KVRoom
from millrace.schedule.ahead import Ahead
from millrace.schedule.refresh import BetweenIterations, BeyondReload
from millrace.schedule.repack import OnDemand
from millrace.schedule.view import ReplicaView, View


def look(num_replicas):
    return View(
        version=0,
        newest=0,
        pullable=(0,),
        steps_left=9,
        batch_groups=5,
        group_size=4,
        max_sequence_tokens=64,
        groups=(),
        replicas=(),
        num_replicas=num_replicas,
    )


def config(schedule, **fields):
    return Config.model_validate(
        {
            "model": {"path": "model"},
            "task": {"kind": "gym", "name": "chain_sum"},
            "reward": {"kind": "gym"},
            "schedule": schedule,
            "batch": {"prompts": 5, "group_size": 4},
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("schedule", "bound", "mixes"),
    [
        ({"kind": "synchronous"}, 0, False),
        ({"kind": "llamarl", "lag": 2}, 2, True),
        ({"kind": "areal", "eta": 3}, 3, True),
        ({"kind": "rlax", "reload_staleness": 1, "acceptance_staleness": 2}, 2, False),
        ({"kind": "laminar", "staleness_max": 5}, 5, False),
        ({"kind": "millrace", "staleness_max": 3}, 3, False),
        ({"kind": "rlboost", "staleness_max": 2}, 2, False),
        ({"kind": "roll_flash", "alpha": 3}, 3, True),
        ({"kind": "roll_flash", "alpha": 0, "mix": "never"}, 0, False),
        ({"kind": "rollpacker"}, 0, False),
        ({"kind": "streamrl"}, 1, False),
        ({"kind": "streamrl", "staleness_max": 0, "mix": "within"}, 0, True),
        ({"kind": "staleflow"}, 3, True),
        ({"kind": "heddle", "staleness_max": 2}, 2, False),
    ],
)
def test_each_kind_builds_its_preset_with_the_bound_of_the_configuration(schedule, bound, mixes):
    built = build(config(schedule))
    assert built.kind == schedule["kind"]
    assert built.staleness_max == bound == config(schedule).staleness_bound
    assert built.mixes_versions is mixes


def test_laminar_derives_its_round_from_the_batch_and_the_replicas_that_are_there():
    built = build(config({"kind": "laminar"})).admit_rule
    one = ReplicaView("a", version=0, slots=100, kv_capacity_tokens=100_000)

    def room(num_replicas):
        return built.room(look(num_replicas), one)

    assert [room(num) for num in (1, 2, 3, 5, 8)] == [5, 3, 2, 1, 1]
    assert build(config({"kind": "laminar", "round_groups": 1})).admit_rule == KVRoom(round_groups=1)


def test_llamarl_derives_its_iteration_from_the_token_budget_and_the_lag():
    built = build(config({"kind": "llamarl", "lag": 2}, sampling={"max_tokens": 100}))
    assert built.refresh_rule == BetweenIterations(34)
    assert build(config({"kind": "llamarl", "iteration_tokens": 8})).refresh_rule == BetweenIterations(8)


def test_rlax_reads_both_knobs():
    built = build(config({"kind": "rlax", "reload_staleness": 1, "acceptance_staleness": 2}))
    assert built.refresh_rule == BeyondReload(1)


def test_millrace_takes_its_bound_into_its_repack():
    built = build(config({"kind": "millrace", "staleness_max": 2, "batch_max": 6, "repack_interval_s": 1}))
    assert built.repack_rule == OnDemand(interval_s=1, ahead=Ahead(2), batch_max=6)


def test_laminar_repacks_only_if_asked_to():
    assert build(config({"kind": "laminar", "repack_interval_s": 2.5})).repack_interval_s == 2.5
    assert build(config({"kind": "laminar", "repack": False})).repack_interval_s is None
    assert build(config({"kind": "areal"})).repack_interval_s is None


def test_the_explanation_has_the_bound_the_arithmetic_and_one_line_for_each_decision():
    explanation = explain(config({"kind": "areal", "eta": 3}, steps=10))
    assert explanation["staleness, worst case"] == "3 versions"
    assert explanation["groups live, at most"] == "(staleness 3 + 1) x 5 prompts = 20 x 4 = 80 trajectories"
    assert list(explanation)[-5:] == ["admit", "route", "refresh", "repack", "take"]
    assert all(line and "\n" not in line for line in explanation.values())


def test_the_explanation_of_a_short_run_counts_only_its_own_groups():
    explanation = explain(config({"kind": "areal", "eta": 30}, steps=2))
    assert explanation["groups live, at most"] == "2 steps x 5 prompts = 10 x 4 = 40 trajectories"


def test_an_unbounded_run_is_told_its_limit_too():
    # Twice a batch, which is more than the 16 slots hold, and one batch in training.
    explanation = explain(
        config({"kind": "laminar", "staleness_max": None}, rollout={"replicas": 2, "slots": 8})
    )
    assert explanation["staleness, worst case"] == "unbounded"
    assert explanation["groups live, at most"].startswith("10 ahead of the trainer + 5 being trained = 15 ")


def test_the_explanation_counts_what_is_redundant():
    redundant = {"redundant_samples": 1, "redundant_groups": 2}
    explanation = explain(config({"kind": "millrace", "staleness_max": 3} | redundant, steps=10))
    assert explanation["groups live, at most"] == (
        "(staleness 3 + 1) x 5 prompts + 2 redundant = 22 x 5 = 110 trajectories"
    )
    explanation = explain(config({"kind": "millrace", "staleness_max": 3} | redundant, steps=2))
    assert (
        explanation["groups live, at most"] == "2 steps x 5 prompts + 2 redundant = 12 x 5 = 60 trajectories"
    )


def replica(name, version, slots=10):
    return ReplicaView(name, version, slots=slots, kv_capacity_tokens=10_000)


def test_rlboost_starts_groups_only_on_replicas_with_the_newest_weights():
    seen = replace(look(2), newest=3, version=3, replicas=(replica("old", 2), replica("new", 3)))
    stale = replace(seen.replicas[0], running=1)
    built = build(config({"kind": "rlboost"}))
    assert set(built.admit(replace(seen, replicas=(stale, seen.replicas[1])))) == {"new"}


def test_rlboost_begins_as_much_as_the_replicas_that_are_there_can_hold():
    built = build(config({"kind": "rlboost", "staleness_max": 3}))

    def live_max(num):
        return built.live_groups_max(
            replace(look(num), replicas=tuple(replica(f"r{i}", 0) for i in range(num)))
        )

    # A batch of 5 groups, and 2 x 10 slots / 4 = 5 groups for each replica, up to the bound's 3 batches.
    assert [live_max(num) for num in range(6)] == [5, 10, 15, 20, 20, 20]
