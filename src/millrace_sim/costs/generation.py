"""Costs of generation: decode steps by roofline, prefill, tensor parallelism, KV room, seconds per sample.

The kernels of a step run one after another, so each has its own roofline and their times add up:

    t(b, K) = max(2 P b / F, W(b) / M)  +  K kappa / M  +  t_reduce(b)  +  t_step + b t_sequence
              matrices                     attention        tensor parallel   the engine itself

with b sequences that hold K KV tokens together, P active parameters, W(b) weight bytes read, kappa KV
bytes per token, F and M the achieved compute and memory rates of the `tensor_parallel` devices of a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from millrace.core.errors import ConfigError
from millrace.placement.memory.engine_memory import kv_room_bytes
from millrace.placement.memory.model_shape import DTYPE_BYTES
from millrace_sim.costs.hardware import Device
from millrace_sim.costs.models import ModelSizes

COMPUTE_EFFICIENCY = 0.7
"""Achieved fraction of peak in large matrix products. Assumed: published cuBLAS timings in bf16 on H100 lie
between 600 and 790 of 989 TFLOP/s."""
MEMORY_EFFICIENCY = 0.8
"""Achieved fraction of memory bandwidth in decode kernels. Assumed, the range of FlashInfer
(arXiv:2501.01005)."""
REDUCE_LATENCY_S = 15e-6
"""One all-reduce of a small tensor between devices of a host. Assumed: custom one-shot kernels, 10 to 20
us."""
REDUCE_LATENCY_OUT_S = 45e-6
"""The latency if the devices span hosts. Assumed: three times as long."""
STEP_S = 0.0015
"""Engine work of a decode step, for any batch: launching a captured graph, and a scheduler pass.
Assumed."""
SEQUENCE_S = 25e-6
"""Engine work per sequence of a step: scheduling, sampling, detokenising on the host. Assumed: at batch
256 it is a third of a step of Llama-3-8B on one H100; vLLM's own profile had 62 % there before its release
0.6.0 and less since (vLLM blog, 2024-09-05)."""


@dataclass(frozen=True)
class Generation:
    """One replica: `tensor_parallel` devices with one copy of the weights.

    Args:
        dtype       of weights and matrix products (`fp8` halves the bytes read and doubles peak compute)
        kv_dtype    of the KV cache
    """

    model: ModelSizes
    device: Device
    tensor_parallel: int = 1
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    @cached_property
    def _flops(self) -> float:
        return self.device.flops(self.dtype) * COMPUTE_EFFICIENCY * self.tensor_parallel

    @cached_property
    def _bytes_per_s(self) -> float:
        return self.device.memory_bytes_per_s * MEMORY_EFFICIENCY * self.tensor_parallel

    # ------------------------------------------------------------ time

    @cached_property
    def kv_token_s(self) -> float:
        """Seconds that one KV token in the cache adds to a decode step."""
        return self.model.kv_token_bytes(self.kv_dtype) / self._bytes_per_s

    def decode_s(self, batch: int, kv_tokens: float) -> float:
        """Seconds of one decode step of `batch` sequences that hold `kv_tokens` together."""
        return (
            self.matrices_s(batch)
            + kv_tokens * self.kv_token_s
            + self.reduce_s(batch)
            + STEP_S
            + batch * SEQUENCE_S
        )

    def matrices_s(self, tokens: int) -> float:
        """Matrix products of a forward pass over `tokens` tokens: compute or weights, whichever is longer."""
        compute_s = 2.0 * self.model.active_parameters * tokens / self._flops
        return max(compute_s, self.model.read_bytes(tokens, self.dtype) / self._bytes_per_s)

    def reduce_s(self, tokens: int) -> float:
        """All-reduces of tensor parallelism: two a layer, ring, each a latency and its bytes."""
        devices = self.tensor_parallel
        if devices == 1:
            return 0.0
        inside = devices <= self.device.devices_per_host
        rate = self.device.scale_up_bytes_per_s if inside else self.device.scale_out_bytes_per_s
        latency_s = REDUCE_LATENCY_S if inside else REDUCE_LATENCY_OUT_S
        payload = 2.0 * (devices - 1) / devices * tokens * self.model.hidden * DTYPE_BYTES["bf16"]
        return 2 * self.model.layers * (latency_s + payload / rate)

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Compute KV of `tokens` new tokens after `context` known ones, in passes that fill the device."""
        if tokens <= 0:
            return 0.0
        attention = tokens * self.model.attention_flops(context + tokens / 2)
        flops = 2.0 * self.model.active_parameters * tokens + attention
        return flops / self._flops + self.reduce_s(tokens)

    def sample_s(self, batch: int, prompt_tokens: float, completion_tokens: float) -> float:
        """eta_g(b) of LlamaRL (arXiv:2505.24034, section 6): seconds per sample with `batch` in flight."""
        context = prompt_tokens + completion_tokens / 2
        return completion_tokens * self.decode_s(batch, batch * context) / batch

    # ------------------------------------------------------------ memory

    @property
    def kv_capacity_tokens(self) -> int:
        """KV tokens that fit beside the weights.

        Raises: ConfigError: the weights do not fit.
        """
        room = self._kv_room_bytes
        if room <= 0:
            needs = self.model.weights_bytes(self.dtype) / 1e9
            raise ConfigError(
                f"{self.model.name} in {self.dtype} needs {needs:.0f} GB for its weights, more than "
                f"{self.tensor_parallel} x {self.device.name} hold: raise the replica's tensor parallel size"
            )
        return int(room / self.model.kv_token_bytes(self.kv_dtype))

    @property
    def fits(self) -> bool:
        return self._kv_room_bytes > 0

    @property
    def _kv_room_bytes(self) -> float:
        weights_bytes = self.model.weights_bytes(self.dtype)
        return kv_room_bytes(self.device.memory_bytes, self.tensor_parallel, weights_bytes)
