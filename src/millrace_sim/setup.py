"""Makes a scenario of a configuration of `millrace simulate`: the cluster, the workload, and the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from millrace.config.schema import Config
from millrace.config.tables.generation import Rollout, SamplingConfig
from millrace.config.tables.operation import Checkpoints, Supervision
from millrace.config.tables.reward_kinds import AgentSection
from millrace.config.tables.schedules import redundant_samples
from millrace.config.tables.task import EnvironmentRewardSection, ExactRewardSection, GymTaskSection, Reward
from millrace.config.tables.training import Model
from millrace.controller.context import LANES
from millrace.controller.pace import Pace
from millrace.core.errors import ConfigError
from millrace.core.types import State
from millrace.ledger.reading import LedgerReader
from millrace_sim.config import (
    EmpiricalLengths,
    LengthsSection,
    LogNormalLengths,
    MixtureLengths,
    SimulatedConfig,
    TurnsLengths,
)
from millrace_sim.costs import hardware, models
from millrace_sim.costs.cluster import Cluster
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.training import Training
from millrace_sim.costs.workload import Drift, Empirical, Lengths, LogNormal, Mixture, Turns, Workload
from millrace_sim.simulation import OtherReplicas, Scale, Scenario
from millrace_sim.virtual.faults import Failures, Faults

UNITS_MAX = 256
"""A completion of the longest length has about this many units of tokens."""
REPORT_S = (0.1, 5.0)
"""Range of the interval between a replica's reports."""
REPORTS_PER_COMPLETION = 64
"""Reports while a replica generates one completion of the longest length."""
PATIENCE_S = 1e6
"""Deadlines of the simulated controller: a simulated step may take hours."""


def scenario(config: SimulatedConfig, *, seed: int | None = None) -> Scenario:
    """The run that `config` describes.

    Raises: ConfigError: an unknown model or device, or weights that do not fit a replica.
    """
    cluster = cluster_of(config)
    quantum = max(1, config.workload.max_tokens // UNITS_MAX)
    costs = cluster.costs(quantum)
    longest_s = config.workload.max_tokens * cluster.generation.decode_s(config.cluster.slots, 0)
    report_s = min(max(longest_s / REPORTS_PER_COMPLETION, REPORT_S[0]), REPORT_S[1])
    run = run_config(config, quantum)
    mtbf_s = config.cluster.replica_mtbf_s
    return Scenario(
        run,
        seed=config.seed if seed is None else seed,
        costs=costs,
        others=others_of(config, cluster, quantum),
        workload=workload_of(config, quantum),
        faults=Faults(failures=(Failures("replica-*", mtbf_s),) if mtbf_s else ()),
        time_max_s=1e9,
        hosts=config.cluster.hosts,
        scale=Scale(
            isolate=False,
            pace=Pace(decision_s=report_s / 4, look_s=report_s / 4, flush_s=8 * report_s),
            report_interval_s=report_s,
            progress_interval_s=8 * report_s if mtbf_s else PATIENCE_S,
            kv_capacity_tokens=costs.kv_capacity_units,
            paged=True,
            parallel_rewards=True,
            keep_events=frozenset(),
        ),
    )


def cluster_of(config: SimulatedConfig) -> Cluster:
    """Raises: ConfigError."""
    section = config.cluster
    device = hardware.device(section.device)
    model = models.model(section.model)
    training = Training(
        model,
        device,
        section.trainer_devices,
        model_parallel=section.model_parallel,
        mfu=section.mfu,
        recompute=section.recompute,
        log_prob_pass=section.log_prob_pass or config.batch.minibatches * config.batch.epochs > 1,
        updates=config.batch.minibatches,
        epochs=config.batch.epochs,
    )
    return Cluster(
        generations_of(config)[0],
        training,
        section.replicas,
        section.transport,
        score_s=section.reward_s,
        hosts=section.hosts,
        colocated=section.colocated,
    )


def others_of(config: SimulatedConfig, cluster: Cluster, quantum: int) -> tuple[OtherReplicas, ...]:
    """The replicas of other kinds than those of `cluster`, in the order of the configuration."""
    kinds = config.cluster.other_replicas
    clusters = [replace(cluster, generation=generation) for generation in generations_of(config)[1:]]
    every = [other.costs(quantum) for other in clusters]
    return tuple(
        OtherReplicas(kind.replicas, costs, costs.kv_capacity_units)
        for kind, costs in zip(kinds, every, strict=True)
    )


def generations_of(config: SimulatedConfig) -> list[Generation]:
    """One replica of each kind. The kind that `replicas` counts is the first."""
    section, model = config.cluster, models.model(config.cluster.model)
    shapes = [(section.replica_device or section.device, section.tensor_parallel)]
    shapes += [(kind.device, kind.tensor_parallel) for kind in section.other_replicas]
    return [Generation(model, hardware.device(name), size, section.dtype) for name, size in shapes]


def check_memory(config: SimulatedConfig) -> None:
    """Refuse a layout that does not fit into the devices' memory. A simulation would not notice.

    Raises: ConfigError: names the side, the bytes and the remedy.
    """
    cluster = cluster_of(config)
    longest = config.workload.prompt_tokens[1] + config.workload.longest
    room = min(generation.kv_capacity_tokens for generation in generations_of(config))
    if room < longest:
        raise ConfigError(
            f"a replica has KV room for {room} tokens, but one trajectory may need {longest}: raise "
            "`cluster.tensor_parallel` or lower `workload.max_tokens`"
        )
    training = cluster.training
    if not training.fits(longest):
        raise ConfigError(
            f"training needs {training.memory_bytes(longest) / 1e9:.0f} GB on each of {training.devices} "
            f"{training.device.name} ({training.device.memory_bytes / 1e9:.0f} GB): raise "
            "`cluster.trainer_devices` or `cluster.model_parallel`"
        )


def workload_of(config: SimulatedConfig, quantum: int) -> Workload:
    members = config.batch.group_size + redundant_samples(config.schedule)
    lengths = lengths_of(config.lengths, members)
    drift = config.workload.drift
    if drift != 1.0:
        lengths = Drift(lengths, drift, config.steps * config.batch.prompts * config.batch.group_size)
    return Workload(
        prompt_tokens=config.workload.prompt_tokens,
        completion=lengths,
        turns=config.workload.turns,
        observation_tokens=config.workload.observation_tokens,
        tool_s=LogNormal.from_percentiles(*config.workload.tool_s),
        start_s=LogNormal.from_percentiles(*start_s) if (start_s := config.workload.start_s) else None,
        own_share=config.workload.own_share,
        quantum=quantum,
    )


def lengths_of(section: LengthsSection, group_size: int) -> Lengths:
    match section:
        case LogNormalLengths():
            lengths = LogNormal.from_percentiles(section.median, section.p99)
            return replace(lengths, shared=section.shared, group_size=group_size)
        case EmpiricalLengths():
            with LedgerReader(Path(section.run) / "ledger.sqlite") as ledger:
                return Empirical.of(ledger.lengths(State.TRAINED))
        case MixtureLengths():
            kinds = zip(section.weights, section.medians, section.p99s, strict=True)
            return Mixture(tuple((w, LogNormal.from_percentiles(m, p)) for w, m, p in kinds))
        case TurnsLengths():
            turn = LogNormal.from_percentiles(section.median, section.p99)
            return Turns(turn, section.turns_mean, section.turns_max, section.reply_tokens)


def run_config(config: SimulatedConfig, quantum: int) -> Config:
    """The training configuration for the real controller, in units of `quantum` tokens."""
    max_units = max(1, config.workload.max_tokens // quantum)
    longest = max(max_units, config.workload.longest // quantum)
    prompt_units = max(1, round(config.workload.prompt_tokens[1] / quantum))
    return Config(
        steps=config.steps,
        seed=config.seed,
        model=Model(path="simulated"),
        task=GymTaskSection(name="simulated"),
        reward=_reward(config),
        batch=config.batch,
        sampling=SamplingConfig(max_tokens=max_units),
        schedule=config.schedule,
        rollout=Rollout(
            replicas=config.cluster.all_replicas,
            slots=config.cluster.slots,
            max_sequence_tokens=max(16, prompt_units + longest),
            colocated=config.cluster.colocated,
            keep_kv=config.cluster.keep_kv,
        ),
        checkpoints=Checkpoints(every=config.steps + 1),
        supervision=Supervision(
            heartbeat_timeout_s=600.0,
            stall_s=PATIENCE_S,
            step_timeout_s=PATIENCE_S,
            restarts=1_000_000,
            spawn_timeout_s=PATIENCE_S,
        ),
    )


def _reward(config: SimulatedConfig) -> Reward:
    """With an environment, as many workers as run all episodes of the replicas' slots at once."""
    if not config.workload.acts:
        return ExactRewardSection(workers=4, timeout_s=PATIENCE_S)
    episodes = config.cluster.all_replicas * config.cluster.slots
    workers, turns = -(-episodes // LANES), config.workload.turns[1]
    agent = AgentSection(command=("simulated",)) if config.workload.start_s else None
    return EnvironmentRewardSection(
        path="simulated:Environment", turns=turns, workers=workers, timeout_s=PATIENCE_S, agent=agent
    )
