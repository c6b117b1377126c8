"""Seeded random worlds for the real controller, and what must hold in every one of them."""

from __future__ import annotations

import random

from millrace.config.schema import (
    RLAX,
    AReaL,
    BatchShape,
    Checkpoints,
    Config,
    GymReward,
    GymTask,
    Laminar,
    LlamaRL,
    Model,
    Rollout,
    SamplingConfig,
    Schedule,
    Supervision,
    Synchronous,
)
from millrace.controller.state import RunState
from millrace.core.types import State
from millrace.schedule.presets import build
from millrace.sim.costs import Costs
from millrace.sim.faults import Failures, Faults, Latency, Slow
from millrace.sim.lengths import LogNormal
from millrace.sim.simulation import Outcome, Scenario
from millrace.sim.workload import Workload

SCHEDULES: tuple[Schedule, ...] = (
    Synchronous(),
    LlamaRL(lag=1),
    LlamaRL(lag=3),
    AReaL(eta=0),
    AReaL(eta=2),
    RLAX(),
    RLAX(reload_staleness=1, acceptance_staleness=3),
    Laminar(),
    Laminar(staleness_max=1, repack_interval_s=1.0),
    Laminar(staleness_max=None, repack_interval_s=0.5),
)


def config(
    schedule: Schedule, *, steps: int = 12, replicas: int = 3, seed: int = 0, **changes: object
) -> Config:
    values: dict[str, object] = {
        "steps": steps,
        "seed": seed,
        "model": Model(path="simulated"),
        "task": GymTask(name="chain_sum"),
        "reward": GymReward(workers=2),
        "batch": BatchShape(prompts=3, group_size=4),
        "sampling": SamplingConfig(max_tokens=128),
        "schedule": schedule,
        "rollout": Rollout(replicas=replicas, slots=8, max_sequence_tokens=256),
        "checkpoints": Checkpoints(every=4),
        "supervision": Supervision(restarts=100_000, lease_s=4.0, backoff_s=0.05, stall_s=120.0),
    }
    return Config(**{**values, **changes})  # type: ignore[arg-type]


def stormy(seed: int) -> Scenario:
    """A random schedule in a random world: crashes of every role, slow replicas, spikes, bad rewards."""
    rng = random.Random(seed)
    failures = tuple(
        Failures(workers, rng.uniform(low, 4 * low))
        for workers, low in (("replica-*", 4.0), ("trainer", 8.0), ("relay", 8.0), ("environment-*", 4.0))
        if rng.random() < 0.6
    )
    slow = (Slow("replica-0", rng.uniform(2, 8)),) if rng.random() < 0.4 else ()
    return Scenario(
        config(rng.choice(SCHEDULES), steps=rng.randint(4, 12), replicas=rng.randint(1, 4), seed=seed),
        seed=seed,
        costs=Costs(step_base_s=rng.uniform(0.05, 1.0)),
        workload=Workload(
            completion=LogNormal(40.0, rng.uniform(0.3, 1.3)),
            failed_fraction=rng.choice((0.0, 0.05)),
            abstained_fraction=rng.choice((0.0, 0.05)),
            bad_prompt_fraction=rng.choice((0.0, 0.1)),
        ),
        faults=Faults(failures=failures, slow=slow),
        latency=Latency(spike_probability=rng.choice((0.0, 0.02)), spike_s=0.5),
        time_max_s=4000.0,
    )


def check_state(state: RunState) -> None:
    """Invariants of the controller's state, after every round of decisions."""
    leased: dict[int, str] = {}
    for name, replica in state.replicas.items():
        for tid, trajectory in replica.leased.items():
            assert tid not in leased, f"{tid} leased by {leased[tid]} and {name}"
            leased[tid] = name
            assert trajectory.state is State.LEASED and trajectory.replica == name, trajectory
            assert tid not in state.queued, trajectory
            assert replica.alive, name
    for tid, trajectory in state.trajectories.items():
        lengths = {len(trajectory.tokens), len(trajectory.logprobs), len(trajectory.versions)}
        assert len(lengths) == 1, trajectory
        assert trajectory.versions == sorted(trajectory.versions), trajectory
        assert (tid in leased) == (trajectory.state is State.LEASED), trajectory
        assert trajectory.group_id in state.groups, trajectory
        birth = state.groups[trajectory.group_id].birth
        assert all(birth <= version for version in trajectory.versions[:1]), (birth, trajectory)


def check_outcome(scenario: Scenario, outcome: Outcome) -> None:
    """What holds when a run is over, whatever happened on the way."""
    schedule = build(scenario.config)
    steps = [event for event in outcome.of("step") if not event["replayed"]]
    assert [step["version"] for step in steps] == list(range(1, scenario.config.steps + 1))
    assert outcome.accounting.balanced, outcome.accounting
    assert outcome.accounting.stale == 0, "a bounded schedule let a group grow too old"
    if schedule.staleness_max is not None:
        assert max(step["staleness_max"] for step in steps) <= schedule.staleness_max
    if not schedule.mixes_versions:
        assert all(e["versions_min"] == e["versions_max"] for e in outcome.of("finished"))
    for published, staged in zip(outcome.of("published"), outcome.of("staged"), strict=False):
        assert published["digest"] == f"sim-{published['version']}"
        assert staged["digest"] == f"sim-{staged['version']}"
    assert all(e["digest"] == f"sim-{e['version']}" for e in outcome.of("pulled"))
