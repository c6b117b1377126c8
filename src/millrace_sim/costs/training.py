"""Costs of an optimizer step: floating-point work over achieved peak, communication, imbalance, memory.

    step = max over ranks of [ work / (F MFU) ]  or the sharded weights' traffic, if that is longer,
           + the log-prob pass over the batch + the optimizer

Work of a token: 6 P forward and backward, attention 12 L q s / 2 (causal), one more forward where
activations are recomputed. MFU counts useful work, so recomputation is time on top of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace.placement.memory import engine_memory
from millrace_sim.costs.hardware import Device
from millrace_sim.costs.models import ModelSizes

MFU = 0.40
"""Model FLOP/s utilisation of dense training without full recomputation: 38 to 43 % in bf16 on H100s
(Llama 3, arXiv:2407.21783, table 4)."""
FORWARD_MFU = 0.50
"""MFU of a forward pass alone, which has neither gradients to reduce nor an optimizer: MFU x 1.25,
assumed."""
OPTIMIZER_BYTES = 28
"""Per parameter, read and written by an Adam step: gradient, master weight and two moments in float32,
twice the last three."""
NETWORK_EFFICIENCY = 0.8
"""Achieved fraction of link rate in large collectives (nccl-tests bus bandwidth on DGX H100)."""


@dataclass(frozen=True)
class Training:
    """A sharded trainer on `devices` devices, `model_parallel` of them to a data-parallel rank.

    Args:
        recompute      all activations are computed again in the backward pass
        log_prob_pass  the trainer first computes the log-probs of the batch with its present weights
    """

    model: ModelSizes
    device: Device
    devices: int
    model_parallel: int = 1
    mfu: float = MFU
    recompute: bool = True
    log_prob_pass: bool = False
    updates: int = 1  # optimizer steps that a batch is split into
    epochs: int = 1  # passes over the batch

    @property
    def ranks(self) -> int:
        return max(1, self.devices // self.model_parallel)

    # ------------------------------------------------------------ time

    def step_s(self, lengths: Sequence[int]) -> float:
        """Seconds to train on sequences of these lengths (prompt and completion)."""
        work = [self.sequence_flops(length) for length in lengths]
        update_s = self.heaviest(work) / (self._rank_flops * self.mfu)
        update_s = max(update_s, self.traffic_s() * self.updates)
        once_s = update_s + self.optimizer_s() * self.updates
        return once_s * self.epochs + self.log_prob_s(lengths)

    def log_prob_s(self, lengths: Sequence[int]) -> float:
        """The forward pass over the batch for log-probs; 0 where there is none."""
        if not self.log_prob_pass:
            return 0.0
        work = [self.forward_flops(length) for length in lengths]
        return self.heaviest(work) / (self._rank_flops * FORWARD_MFU)

    def heaviest(self, work: Iterable[float]) -> float:
        """Work of the busiest rank: sequences dealt longest first to the idlest rank, for each update."""
        work = sorted(work, reverse=True)
        if not work:
            return 0.0
        busiest = 0.0
        for update in range(self.updates):
            ranks = [0.0] * self.ranks
            for item in work[update :: self.updates]:
                heapq.heapreplace(ranks, ranks[0] + item)
            busiest += max(ranks)
        return busiest

    def sequence_flops(self, length: int) -> float:
        """Forward and backward of one sequence, with recomputation."""
        return self.forward_flops(length) * (4.0 if self.recompute else 3.0)

    def forward_flops(self, length: int) -> float:
        attention = self.model.attention_flops(length / 2)
        return length * (2.0 * self.model.active_parameters + attention)

    @property
    def _rank_flops(self) -> float:
        return self.device.bf16_flops * self.model_parallel

    def traffic_s(self) -> float:
        """Gathering sharded weights for forward and backward and reducing gradients, once: three times the
        weights through the network of a host (NVLink where the trainer is one host)."""
        device = self.device
        if self.devices == 1:
            return 0.0
        if self.devices <= device.devices_per_host:
            rate = device.scale_up_bytes_per_s
        else:
            rate = device.scale_out_bytes_per_s * device.devices_per_host
        return 3.0 * self.model.weights_bytes() / (rate * NETWORK_EFFICIENCY)

    def optimizer_s(self) -> float:
        """An Adam step on sharded state."""
        return self.model.parameters / self.devices * OPTIMIZER_BYTES / self.device.memory_bytes_per_s

    def sample_s(self, micro_batch: int, length: int) -> float:
        """eta_t(b) of LlamaRL (arXiv:2505.24034, section 6): seconds per sample on one rank of a
        micro-batch of `micro_batch`; the traffic of sharded weights is paid per micro-batch, so it falls
        with b."""
        compute_s = self.sequence_flops(length) / (self._rank_flops * self.mfu)
        return max(compute_s, self.traffic_s() / micro_batch)

    # ------------------------------------------------------------ memory

    def activation_bytes(self, tokens: int) -> float:
        """Of a micro-batch of `tokens` tokens, on all devices of a rank together."""
        model = self.model
        return engine_memory.activation_bytes(tokens, model.layers, model.hidden, recompute=self.recompute)

    def memory_bytes(self, micro_batch_tokens: int) -> float:
        """Per device."""
        activations = self.activation_bytes(micro_batch_tokens)
        return engine_memory.trainer_bytes(
            self.model.parameters, activations, devices=self.devices, model_parallel=self.model_parallel
        )

    def fits(self, micro_batch_tokens: int) -> bool:
        return self.memory_bytes(micro_batch_tokens) <= engine_memory.usable_bytes(self.device.memory_bytes)
