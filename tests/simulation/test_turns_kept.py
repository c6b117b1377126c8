"""Keys and values that stay between two turns, in the simulated engine and in simulated runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.config.tables.schedules import AReaL
from millrace.core.types import Sampling, Work
from millrace_sim.config import SimulatedConfig
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.explore.worlds import small_config, with_turns
from millrace_sim.measure import measure
from millrace_sim.roles.batching import BatchingEngine
from millrace_sim.setup import scenario
from millrace_sim.simulation import Outcome, Scenario, simulate
from tests.long import long

PROMPT, TURN, OBSERVED = 10, 20, 5


def engine_of(
    slots: int = 4, *, capacity: int = 4000, paged: bool = False, keep_kv: bool = True
) -> BatchingEngine:
    workload = Workload(completion=LogNormal(float(TURN), 0.0))
    settings = {"costs": Costs(), "workload": workload, "paged": paged, "keep_kv": keep_kv}
    engine = BatchingEngine(slots=slots, kv_capacity_tokens=capacity, **settings)
    engine.swap(0, 0.0, 1.0)
    return engine


def turn(tid: int, number: int = 0) -> Work:
    start = number * (TURN + OBSERVED)
    return Work(tid, tid, number, [0] * PROMPT, [0] * start, Sampling(start + 100), 0, start)


def played(engine: BatchingEngine, now_s: float, *works: Work) -> int:
    """Play turns to their end, from `now_s` to a second later. Returns how many tokens were prefilled."""
    before = engine.load().prefilled_tokens
    engine.submit(works, now_s, 1.0)
    engine.collect(now_s + 1.0, 1.0)
    assert engine.quiet
    return engine.load().prefilled_tokens - before


@pytest.mark.parametrize("paged", [False, True])
def test_the_next_turn_prefills_new_tokens_alone(paged: bool) -> None:
    kept, dropped = (engine_of(paged=paged, keep_kv=keep) for keep in (True, False))
    for engine in (kept, dropped):
        assert played(engine, 0.0, turn(0)) == PROMPT
    assert played(kept, 2.0, turn(0, 1)) == OBSERVED
    assert played(dropped, 2.0, turn(0, 1)) == PROMPT + TURN + OBSERVED
    assert (kept.load().reused_tokens, dropped.load().reused_tokens) == (PROMPT + TURN, 0)


def test_new_weights_and_sleep_drop_it() -> None:
    engine = engine_of()
    played(engine, 0.0, turn(0))
    engine.swap(1, 1.0, 1.0)
    assert played(engine, 2.0, turn(0, 1)) == PROMPT + TURN + OBSERVED
    engine.sleep(4.0, 1.0)
    engine.swap(2, 5.0, 1.0)
    assert played(engine, 6.0, turn(0, 2)) == PROMPT + 2 * (TURN + OBSERVED)


@pytest.mark.parametrize(("paged", "slots", "capacity"), [(False, 2, 4000), (False, 4, 240), (True, 4, 70)])
def test_running_sequences_take_the_room_they_need(paged: bool, slots: int, capacity: int) -> None:
    engine = engine_of(slots, capacity=capacity, paged=paged)
    played(engine, 0.0, turn(0))
    played(engine, 2.0, turn(1), turn(2))
    assert engine.load().evicted_tokens >= PROMPT + TURN
    assert engine.load().kv_used_tokens == 0


def kept_and_dropped(made: Scenario) -> list[Outcome]:
    rollouts = [made.config.rollout.model_copy(update={"keep_kv": keep}) for keep in (True, False)]
    return [
        simulate(replace(made, config=made.config.model_copy(update={"rollout": one}))) for one in rollouts
    ]


def test_a_run_reuses_what_was_computed_and_trains_the_same_tokens() -> None:
    made = with_turns(Scenario(small_config(AReaL(eta=2), replicas=2), seed=3))
    kept, dropped = kept_and_dropped(made)
    for outcome in (kept, dropped):
        assert outcome.accounting.balanced and not outcome.accounting.in_flight
    reused = [sum(event["reused_tokens"] > 0 for event in one.of("report")) for one in (kept, dropped)]
    assert reused[0] > 0 == reused[1]


@long
def test_a_cluster_with_long_episodes_is_faster_with_it() -> None:
    tree = {
        "steps": 3,
        "batch": {"prompts": 4, "group_size": 4},
        "schedule": {"kind": "synchronous"},
        "lengths": {"kind": "lognormal", "median": 50, "p99": 200},
        "workload": {
            "prompt_tokens": (4096, 8192),
            "max_tokens": 512,
            "turns": (8, 8),
            "observation_tokens": 2000,
            "tool_s": (0.5, 2.0),
        },
    }
    cluster = {"model": "Qwen2.5-7B", "replicas": 2, "slots": 16}
    speeds = []
    for keep in (True, False):
        config = SimulatedConfig.model_validate(tree | {"cluster": cluster | {"keep_kv": keep}})
        speeds.append(measure(scenario(config))[0].trained_tokens_per_s)
    assert speeds[0] > 1.2 * speeds[1]
