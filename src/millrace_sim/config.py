"""Configuration of a simulated run on a cluster that need not exist, and of a question to the planner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from millrace.config.tables.generation import Rollout
from millrace.config.tables.schedules import Millrace, Schedule
from millrace.config.tables.section import Section
from millrace.config.tables.training import BatchShape
from millrace_sim.costs.hardware import DEVICE_MTBF_H
from millrace_sim.costs.transport import Transport

_ROLLOUT = Rollout()


class ReplicaKind(Section):
    device: str
    """A name of `millrace_sim/costs/hardware.py`."""
    replicas: int = Field(ge=1)
    """Copies of the inference service on this device."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices of one replica."""


class ClusterSection(Section):
    model: str
    """A name of `millrace_sim/costs/models.py` (`Qwen2.5-7B`), or a directory with a `config.json`."""
    device: str = "H100"
    """A name of `millrace_sim/costs/hardware.py`."""
    replica_device: str | None = None
    """Device of generation. `"none"`: the device of training."""
    trainer_devices: int = Field(default=8, ge=1)
    """Devices of the trainer."""
    model_parallel: int = Field(default=1, ge=1)
    """Trainer devices that share one sequence (tensor, pipeline and context parallel together)."""
    replicas: int = Field(default=8, ge=1)
    """Copies of the inference service."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices of one replica."""
    other_replicas: tuple[ReplicaKind, ...] = ()
    """More replicas, on devices of other kinds: each kind has its own speed and KV room. All have `slots`."""
    colocated: bool = _ROLLOUT.colocated
    """Trainer and replicas use the same devices, in shifts. `schedule` is one that `rollout.colocated` goes
    with."""
    dtype: Literal["bf16", "fp8"] = "bf16"
    """Number format of generation."""
    slots: int = Field(default=64, ge=1)
    """Trajectories that one replica decodes at the same time."""
    keep_kv: bool = _ROLLOUT.keep_kv
    """As `rollout.keep_kv`: keys and values of a trajectory stay between its turns, while there is room."""
    transport: Transport = "relay"
    """How weights reach the replicas."""
    hosts: int = Field(default=1, ge=1, le=1024)
    """Hosts that are simulated one by one, with a relay each. Replicas go round them. 1: the chain of relays
    is one constant."""
    mfu: float = Field(default=0.4, gt=0, le=1)
    """Model FLOP/s utilisation of training."""
    recompute: bool = True
    """Activations are computed again in the backward pass."""
    log_prob_pass: bool = False
    """The trainer computes the batch's log-probs before it trains."""
    reward_s: float = Field(default=0.1, gt=0)
    """Mean latency of a reward. A sandbox takes seconds."""
    replica_mtbf_s: float | None = None
    """Mean time between failures of a replica. `"none"`: no replica fails."""

    @property
    def all_replicas(self) -> int:
        return self.replicas + sum(kind.replicas for kind in self.other_replicas)

    @model_validator(mode="after")
    def _devices_of_one_kind(self) -> ClusterSection:
        if self.colocated and self.other_replicas:
            raise ValueError(
                "`cluster.other_replicas` have devices of their own, and with `cluster.colocated` both sides "
                "use the same devices: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _hosts_have_relays(self) -> ClusterSection:
        if self.hosts > self.replicas:
            raise ValueError(
                f"`cluster.hosts` ({self.hosts}) is more than `cluster.replicas` ({self.replicas}): a host "
                "without a replica needs no relay"
            )
        if self.hosts > 1 and self.transport not in ("relay", "delta"):
            raise ValueError(
                f'`cluster.hosts` ({self.hosts}) needs `cluster.transport` "relay" or "delta": with '
                f'"{self.transport}" there are no relays'
            )
        return self


class LogNormalLengths(Section):
    kind: Literal["lognormal"] = "lognormal"
    median: float = Field(default=2000.0, gt=0)
    """Tokens of a completion."""
    p99: float = Field(default=20_000.0, gt=0)
    """99th percentile, before `max_tokens` cuts it."""
    shared: float = Field(default=0.0, ge=0, le=1)
    """How alike the completions of a prompt are: the share of the variance of log lengths that they have in
    common."""


class EmpiricalLengths(Section):
    kind: Literal["empirical"] = "empirical"
    run: str
    """A run directory. Completion lengths are drawn from its ledger."""


class MixtureLengths(Section):
    kind: Literal["mixture"] = "mixture"
    weights: list[float]
    """Weight of each kind of task. The weights need not sum to 1."""
    medians: list[float]
    """Median length of each kind of task, in tokens."""
    p99s: list[float]
    """99th percentile of the length of each kind of task, in tokens."""

    @model_validator(mode="after")
    def _same_size(self) -> MixtureLengths:
        if not len(self.weights) == len(self.medians) == len(self.p99s) >= 1:
            raise ValueError(
                f"`lengths.weights` ({len(self.weights)}), `medians` ({len(self.medians)}) and `p99s` "
                f"({len(self.p99s)}) must have one entry for each kind of task"
            )
        return self


class TurnsLengths(Section):
    kind: Literal["turns"] = "turns"
    median: float = Field(default=400.0, gt=0)
    """Tokens of one turn."""
    p99: float = Field(default=2000.0, gt=0)
    """99th percentile of a turn."""
    turns_mean: float = Field(default=5.0, ge=1)
    """Mean of the number of turns, which is geometric."""
    turns_max: int = Field(default=64, ge=1)
    """Most turns."""
    reply_tokens: float = Field(default=200.0, ge=0)
    """Tokens of the environment's reply to each turn but the last."""


LengthsSection = Annotated[
    LogNormalLengths | EmpiricalLengths | MixtureLengths | TurnsLengths, Field(discriminator="kind")
]


class WorkloadSection(Section):
    prompt_tokens: tuple[int, int] = (256, 1024)
    """Shortest and longest prompt. Lengths are uniform between the two."""
    max_tokens: int = Field(default=16_384, ge=1)
    """Longest completion. With an environment, of one turn."""
    drift: float = Field(default=1.0, gt=0)
    """Factor by which completions grow over the simulated steps."""
    turns: tuple[int, int] = (1, 1)
    """Fewest and most turns of an episode, uniform between the two. With `[1, 1]` no environment answers.
    Otherwise `lengths` are of one turn."""
    observation_tokens: int = Field(default=200, ge=1)
    """Tokens of an answer of the environment."""
    tool_s: tuple[float, float] = (1.0, 10.0)
    """Median and 99th percentile of the time of an answer, which is log-normal."""

    start_s: tuple[float, float] | None = None
    """Median and 99th percentile of the time until an agent makes its first request. `"none"`: no agent
    starts."""
    own_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the prompt of an agent that differs from those of other agents of its row."""

    @model_validator(mode="after")
    def _ascending(self) -> WorkloadSection:
        if not 1 <= self.turns[0] <= self.turns[1]:
            raise ValueError(f"`workload.turns` {list(self.turns)}: fewest and most turns, from 1 on")
        for name, times in ("tool_s", self.tool_s), ("start_s", self.start_s):
            if times is not None and not 0 < times[0] <= times[1]:
                raise ValueError(f"`workload.{name}` {list(times)}: a median above 0, and a larger p99")
        if self.start_s is not None and not self.acts:
            raise ValueError(
                "`workload.start_s` is of agents, and `workload.turns` [1, 1] has no environment"
            )
        return self

    @property
    def acts(self) -> bool:
        """Whether an environment answers between turns."""
        return self.turns[1] > 1

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory, without its prompt."""
        return self.turns[1] * self.max_tokens + (self.turns[1] - 1) * self.observation_tokens


class SimulatedConfig(Section):
    """A simulated run. `batch` and `schedule` mean what they mean in a training run."""

    steps: int = Field(default=12, ge=3)
    """Optimizer steps."""
    seed: int = 0
    """Seed of lengths, latencies and failures."""
    batch: BatchShape = BatchShape(prompts=64, group_size=16)
    schedule: Schedule = Millrace()
    cluster: ClusterSection
    lengths: LengthsSection = LogNormalLengths()
    workload: WorkloadSection = WorkloadSection()

    @model_validator(mode="after")
    def _one_kind_of_turns(self) -> SimulatedConfig:
        if self.workload.acts and self.lengths.kind == "turns":
            raise ValueError(
                '`lengths.kind` "turns" makes one text of all turns, and `workload.turns` '
                f"{list(self.workload.turns)} has an environment between them: use one of the two"
            )
        return self


class PlanBatch(Section):
    prompts: tuple[int, ...] = (512,)
    """Groups per optimizer step. The planner chooses one of these numbers."""
    group_size: int = Field(default=16, ge=2)
    """Trajectories per group."""


class Search(Section):
    simulations: int = Field(default=10, ge=1)
    """Most simulated runs. Each takes seconds to a minute."""
    steps: int = Field(default=9, ge=3)
    """Optimizer steps of each simulated run. The first third is warm-up."""
    replicas_max: int = Field(default=16, ge=1)
    """A plan of more replicas is simulated with this many, everything else in proportion."""
    dtypes: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    """Number formats of generation. `fp8` halves the bytes that a decode step reads, and widens the
    log-prob gap."""
    transports: tuple[Transport, ...] = ("relay",)
    """Ways of the weights to the replicas. The planner compares them if there are several."""


class PlanConfig(Section):
    """A question to the planner."""

    model: str
    """A name of `millrace_sim/costs/models.py`, or a directory with a `config.json`."""
    devices: dict[str, int]
    """How many devices of each kind, as `H800 = 64`. `millrace_sim/costs/hardware.py` has the names."""
    staleness_max: int = Field(default=4, ge=0)
    """Staleness bound, in versions. 0 asks for synchronous training."""
    batch: PlanBatch = PlanBatch()
    lengths: LengthsSection = LogNormalLengths()
    workload: WorkloadSection = WorkloadSection()
    search: Search = Search()
    device_mtbf_h: float = Field(default=round(DEVICE_MTBF_H), gt=0)
    """Mean hours between failures of one device, with its share of host, network and software. It decides
    `checkpoints.every`. The default is what Llama 3 published."""
    base: str | None = None
    """A training configuration with your model, task and reward. The planner replaces the keys that it chose.
    `"none"`: the written configuration names a model directory and a file of rows for you to replace."""
    seed: int = 0
    """Seed of the simulations."""
