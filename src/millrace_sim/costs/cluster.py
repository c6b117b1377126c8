"""A cluster and a layout, as the cost model of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from millrace.placement.memory.engine_memory import checkpoint_bytes
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.training import Training
from millrace_sim.costs.transport import CHUNK_S, Transfer, Transport, transfer

LOAD_BYTES_PER_S = 2e9
"""Read rate of a checkpoint's shard, per host, from a shared file system. Assumed."""
SNAPSHOT_S = 1.0
"""The trainer's stall for an asynchronous checkpoint. Assumed: a copy of its shards to host memory."""


@dataclass(frozen=True)
class Cluster:
    """One trainer, and `replicas` equal copies of the inference service.

    Args:
        generation  one replica, its devices and precision
        training    the trainer
        score_s     mean latency of a reward (a sandbox: seconds)
        hosts       simulated one by one, with a relay each; 1: the chain of relays is one constant
        colocated   both sides use the same devices, in turns
    """

    generation: Generation
    training: Training
    replicas: int
    transport: Transport = "relay"
    score_s: float = 0.1
    hosts: int = 1
    colocated: bool = False

    def __str__(self) -> str:
        generation, training = self.generation, self.training
        return (
            f"{training.devices} {training.device.name} for training and {self.replicas} replicas of "
            f"{generation.tensor_parallel} {generation.device.name} for generation of {generation.model.name}"
        )

    @property
    def devices(self) -> int:
        generating = self.replicas * self.generation.tensor_parallel
        sides = self.training.devices, generating
        return max(sides) if self.colocated else sum(sides)

    @cached_property
    def transfer(self) -> Transfer:
        return transfer(
            self.transport,
            self.generation.model,
            self.generation.device,
            trainer_devices=self.training.devices,
            replicas=self.replicas,
            tensor_parallel=self.generation.tensor_parallel,
            dtype=self.generation.dtype,
        )

    def costs(self, quantum: int) -> ClusterCosts:
        """In units of `quantum` tokens (`sim.costs.workload.Workload.quantum`)."""
        return ClusterCosts(self, quantum)


@dataclass(frozen=True)
class ClusterCosts:
    """A `CostModel`. A unit of tokens is `quantum` decode steps, and KV grows by the same number."""

    cluster: Cluster
    quantum: int
    prompts_s: float = 0.01
    contention: float = 1.0
    handover_s: float = 0.0  # `Generation.decode_s` has the engine's own work

    @property
    def _generation(self) -> Generation:
        return self.cluster.generation

    @cached_property
    def kv_token_s(self) -> float:
        return self._generation.kv_token_s * self.quantum**2

    def decode_step_s(self, batch: int) -> float:
        growth_s = batch * self._generation.kv_token_s * (self.quantum - 1) / 2
        return self.quantum * (self._generation.decode_s(batch, 0) + growth_s)

    def prefill_s(self, tokens: int, context: int) -> float:
        return self._generation.prefill_s(tokens * self.quantum, context * self.quantum)

    def train_s(self, lengths: Sequence[int]) -> float:
        return self.cluster.training.step_s([length * self.quantum for length in lengths])

    @property
    def kv_capacity_units(self) -> int:
        return self._generation.kv_capacity_tokens // self.quantum

    @property
    def publish_s(self) -> float:
        return self.cluster.transfer.trainer_stall_s

    @property
    def digest_s(self) -> float:
        return self.cluster.transfer.digest_s

    @property
    def stage_s(self) -> float:
        return self.cluster.transfer.available_s if self.cluster.hosts == 1 else 0.0

    @property
    def fetch_s(self) -> float:
        return self.cluster.transfer.fetch_s

    @property
    def hop_s(self) -> float:
        return CHUNK_S

    @property
    def pull_s(self) -> float:
        return self.cluster.transfer.background_s

    @property
    def swap_s(self) -> float:
        return self.cluster.transfer.replica_stall_s

    @property
    def score_s(self) -> float:
        return self.cluster.score_s

    @property
    def weights_bytes(self) -> int:
        return self._generation.model.weights_bytes(self._generation.dtype)

    @property
    def load_s(self) -> float:
        training = self.cluster.training
        hosts = -(-training.devices // training.device.devices_per_host)
        return checkpoint_bytes(training.model.parameters) / hosts / LOAD_BYTES_PER_S

    @property
    def sleep_s(self) -> float:
        training = self.cluster.training
        kept_bytes = checkpoint_bytes(training.model.parameters) / training.devices
        return kept_bytes / training.device.host_bytes_per_s

    @property
    def wake_s(self) -> float:
        return self.sleep_s

    @property
    def snapshot_s(self) -> float:
        return SNAPSHOT_S

    @property
    def save_s(self) -> float:
        return self.load_s
