"""Seeded random worlds: a small run of a random schedule, and its faults."""

from __future__ import annotations

import random
from dataclasses import replace

from millrace.config.schema import Config
from millrace.config.tables.generation import Rollout, SamplingConfig
from millrace.config.tables.operation import Checkpoints, LocalHosts, Supervision
from millrace.config.tables.reward_kinds import AgentSection, RewardLimits
from millrace.config.tables.schedules import (
    RLAX,
    AReaL,
    Heddle,
    Laminar,
    LlamaRL,
    Millrace,
    RLBoost,
    RollFlash,
    Schedule,
    StaleFlow,
    StreamRL,
    Synchronous,
)
from millrace.config.tables.task import EnvironmentRewardSection, GymRewardSection, GymTaskSection
from millrace.config.tables.training import BatchShape, Model
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.simulation import Scaling, Scenario
from millrace_sim.virtual.faults import (
    ClockJump,
    Corruption,
    Crash,
    Failures,
    Faults,
    Latency,
    Mishaps,
    Notice,
    Partitions,
    Slow,
)

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
    Millrace(repack_interval_s=0.5),
    Millrace(staleness_max=1, repack_interval_s=0.2, batch_max=3),
)
NEWER_SCHEDULES: tuple[Schedule, ...] = (
    RLBoost(),
    RLBoost(staleness_max=0),
    RollFlash(),
    RollFlash(alpha=1, redundant_samples=2, redundant_groups=3, mix="never"),
    StreamRL(),
    StreamRL(staleness_max=3, mix="within"),
    StaleFlow(staleness_max=1),
    StaleFlow(),
    Heddle(),
    Heddle(staleness_max=2),
)
"""They may start more than they train. Drawn apart, so that all other worlds stay as they are."""
NEWER_SHARE = 1 / 3
STEPS_MAX = 12  # of a user's own configuration: a broken promise shows early
TIME_MAX_S = 5_000.0
AGENTS_TIME_MAX_S = 15_000.0  # a worker that is cut off is lost a minute later, and its agents start again
HEARTBEAT_TIMEOUT_S = 4.0
RESTART_WINDOW_S = 15.0  # short, so that waits before restarts are short too: workers die often here


def small_config(
    schedule: Schedule, *, steps: int = 8, replicas: int = 3, seed: int = 0, **changes: object
) -> Config:
    """A run small enough for thousands of them. `changes` are sections of the configuration."""
    values: dict[str, object] = {
        "steps": steps,
        "seed": seed,
        "model": Model(path="simulated"),
        "task": GymTaskSection(name="chain_sum"),
        "reward": GymRewardSection(workers=2),
        "batch": BatchShape(prompts=2, group_size=3),
        "sampling": SamplingConfig(max_tokens=160),
        "schedule": schedule,
        "rollout": Rollout(replicas=replicas, slots=4, max_sequence_tokens=256, report_interval_s=0.15),
        "checkpoints": Checkpoints(every=3),
        "supervision": Supervision(
            restarts=100_000,
            restart_window_s=RESTART_WINDOW_S,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            backoff_s=0.05,
            stall_s=1200.0,
            step_timeout_s=30.0,
        ),
    }
    return Config.model_validate({**values, **changes})


def random_world(seed: int, config: Config | None = None) -> Scenario:
    """World number `seed`. `config`: a user's run, shortened, instead of a random run.

    Each kind of fault is in some of the worlds only, so that a failing seed is informative.
    """
    rng, hostile = random.Random(seed), random.Random(f"hostile {seed}")
    run, hosts = _random_config(rng, seed), random.Random(f"hosts {seed}").choice((1, 1, 2, 3))
    if random.Random(f"scorers {seed}").random() < 0.2:
        run = run.model_copy(update={"reward": run.reward.model_copy(update={"workers_max": 4})})
    if random.Random(f"screen {seed}").random() < 0.2:
        run = run.model_copy(update={"batch": run.batch.model_copy(update={"screen_samples": 2})})
    if random.Random(f"standby {seed}").random() < 0.2:
        run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"standby": True})})
    if config is not None:
        run = _hardened(config, seed)
        hosts = config.runtime.hosts if isinstance(config.runtime, LocalHosts) else hosts
    scenario = Scenario(
        run,
        seed=seed,
        costs=Costs(step_base_s=rng.uniform(0.02, 0.5)),
        workload=Workload(
            completion=LogNormal(rng.choice((20.0, 60.0)), rng.uniform(0.3, 1.3)),
            failed_fraction=rng.choice((0.0, 0.05)),
            abstained_fraction=rng.choice((0.0, 0.05)),
            bad_prompt_fraction=rng.choice((0.0, 0.1)),
            unanswered_fraction=hostile.choice((0.0, 0.0, 0.0, 0.02)),
            starved_fraction=hostile.choice((0.0, 0.0, 0.0, 0.02)),
        ),
        faults=_with_hostile(_random_faults(rng), hostile),
        latency=Latency(spike_probability=rng.choice((0.0, 0.02, 0.1)), spike_s=0.5),
        time_max_s=TIME_MAX_S,
        hosts=min(hosts, run.rollout.replicas),
    )
    if run.rollout.colocated:
        return replace(scenario, hosts=1, faults=_on_one_machine(scenario.faults))
    fleet = random.Random(f"fleet {seed}")
    if config is not None or fleet.random() > 0.25:
        return scenario
    return replace(spot(scenario, fleet), later_hosts=fleet.choice((0, 1, 2)))


def with_turns(scenario: Scenario, *, agents: bool = False) -> Scenario:
    """The world with an environment: up to four turns, whose answers take from moments to minutes. `agents`:
    each trajectory has one, which starts slowly and asks something of its own."""
    config, agent = scenario.config, AgentSection(command=("simulated",)) if agents else None
    limits = config.reward.model_dump(include=set(RewardLimits.model_fields)) | {"timeout_s": 60.0}
    reward = EnvironmentRewardSection(path="simulated:Environment", agent=agent, **limits)
    sampling = config.sampling.model_copy(update={"max_tokens": 60})
    return replace(
        scenario,
        time_max_s=max(scenario.time_max_s, AGENTS_TIME_MAX_S) if agents else scenario.time_max_s,
        config=config.model_copy(update={"reward": reward, "sampling": sampling}),
        workload=replace(
            scenario.workload,
            completion=LogNormal(20.0, 0.8),
            turns=(1, 4),
            observation_tokens=8,
            forked_fraction=0.3,
            tool_s=LogNormal(0.5, 1.5),
            start_s=LogNormal(2.0, 1.0) if agents else None,
            own_share=0.4 if agents else 0.0,
        ),
    )


def _random_config(rng: random.Random, seed: int) -> Config:
    schedule, steps, replicas = rng.choice(SCHEDULES), rng.randint(3, 8), rng.randint(1, 4)
    newer = random.Random(f"which schedule {seed}")
    if newer.random() < NEWER_SHARE:
        schedule = newer.choice(NEWER_SCHEDULES)
    if isinstance(schedule, Millrace) and random.Random(f"redundant {seed}").random() < 0.5:
        schedule = schedule.model_copy(update={"redundant_samples": 1, "redundant_groups": 2})
    config = small_config(schedule, steps=steps, replicas=replicas, seed=seed)
    return crowded(config) if rng.random() < 0.15 else config


def crowded(config: Config) -> Config:
    """The configuration with so many trajectories in flight that those of one replica do not always fit onto
    one other."""
    rollout = config.rollout.model_copy(update={"slots": 8})
    return config.model_copy(update={"batch": BatchShape(prompts=8, group_size=3), "rollout": rollout})


def _hardened(config: Config, seed: int) -> Config:
    """Few steps, and 100,000 restarts allowed: workers die often here."""
    supervision = config.supervision
    patient = supervision.model_copy(
        update={
            "restarts": 100_000,
            "restart_window_s": RESTART_WINDOW_S,
            "step_timeout_s": min(supervision.step_timeout_s, supervision.stall_s / 4),
        }
    )
    changes = {"seed": seed, "steps": min(config.steps, STEPS_MAX), "supervision": patient}
    return config.model_copy(update=changes)


def _random_faults(rng: random.Random) -> Faults:
    return Faults(
        failures=tuple(
            Failures(workers, rng.uniform(low, 4 * low))
            for workers, low in (
                ("replica-*", 4.0),
                ("trainer*", 8.0),
                ("relay*", 8.0),
                ("reward-worker-*", 4.0),
            )
            if rng.random() < 0.4
        ),
        slow=tuple(
            Slow(workers, rng.uniform(2, 8))
            for workers in ("replica-0", "relay*", "trainer*", "reward-worker-0")
            if rng.random() < 0.15
        ),
        partitions=tuple(
            Partitions(workers, rng.uniform(4.0, 20.0), rng.choice(((0.5, 3.0), (3.0, 30.0), (1e6, 2e6))))
            for workers, share in (
                ("replica-*", 0.3),
                ("trainer*", 0.1),
                ("relay*", 0.1),
                ("reward-worker-*", 0.1),
            )
            if rng.random() < share
        ),
        mishaps=(_random_mishaps(rng),) if rng.random() < 0.4 else (),
        corruption=Corruption(written=0.05, read=0.02) if rng.random() < 0.1 else Corruption(),
        clock_jumps=tuple(
            ClockJump(rng.uniform(0.5, 20.0), rng.choice((0.5, 3.0, 20.0)))
            for _ in range(rng.choice((0, 0, 0, 1, 2)))
        ),
        controller_crashes=tuple(rng.uniform(0.5, 12.0) for _ in range(rng.choice((0, 0, 0, 1, 2, 4)))),
    )


def _on_one_machine(faults: Faults) -> Faults:
    """No worker that holds memory of a lent device is cut off: who kills it sees it die."""
    able = tuple(p for p in faults.partitions if p.workers.startswith(("relay", "reward")))
    return replace(faults, partitions=able)


def _with_hostile(faults: Faults, rng: random.Random) -> Faults:
    """Several workers dead in one moment, and trajectories that no step can be made of."""
    salvos = [rng.uniform(0.5, 15.0) for _ in range(rng.choice((0, 0, 1, 3)))]
    crashes = [
        Crash(workers, at_s)
        for at_s in salvos
        for workers in rng.sample(("replica-*", "replica-0", "trainer*", "relay*", "reward-worker-*"), 3)
    ]
    return replace(faults, crashes=tuple(crashes), poisonous=rng.choice((0.0, 0.0, 0.0, 0.004)))


def _random_mishaps(rng: random.Random) -> Mishaps:
    def sometimes(probability: float) -> float:
        return rng.choice((0.0, probability))

    return Mishaps(
        "*",
        lost=sometimes(0.005),
        unanswered=sometimes(0.005),
        doubled=sometimes(0.1),
        overtaken=sometimes(0.3),
        overtaken_s=rng.choice((0.2, 1.0, 1.5 * HEARTBEAT_TIMEOUT_S)),
    )


def spot(scenario: Scenario, rng: random.Random) -> Scenario:
    """The scenario with replicas that join and leave: by command, by notice with more or less grace, and by
    death."""
    at_s, scalings = 0.0, []
    for _ in range(rng.randint(1, 8)):
        at_s += rng.uniform(0.05, 6.0)
        scalings.append(Scaling(at_s, rng.choice((0, 1, 1, 2, 3, 5))))
    scalings.append(Scaling(at_s + 5.0, 2))
    notices = tuple(
        Notice(
            rng.choice(("replica-*", *(f"replica-{i}" for i in range(9)))),
            rng.uniform(0.1, 20.0),
            rng.choice((0.05, 0.5, 25.0)),
        )
        for _ in range(rng.randint(0, 4))
    )
    return replace(scenario, scalings=tuple(scalings), faults=replace(scenario.faults, notices=notices))
