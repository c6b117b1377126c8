"""The memory that any process keeps, what a replica keeps by its engine (`engine_kinds.ENGINES`), and memory
by a model's dimensions alone, for the simulator and the planner. Pure.

No library is imported: every process may import this module.

`needs` counts what Millrace keeps, from a model's files. For devices that are not here these are the formulas
of papers instead, of a trainer in bf16 on any framework. A number format has the names of `DTYPE_BYTES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from millrace.placement.memory.model_shape import DTYPE_BYTES, kv_bytes

CONTEXT_BYTES = 500_000_000
"""Memory of a GPU that CUDA takes for each process that opens the GPU (an H100 with torch 2.x: 0.4 to 0.6
GB)."""
LIBRARIES_BYTES = 500_000_000
"""Memory of a replica's share that does not grow with the model: workspaces of cuBLAS (32 MiB a stream on an
H100), recorded decode steps, whole blocks of torch's allocator."""
FORK_BYTES = 100_000_000
"""Of a replica's process beside the memory that it keeps. A fork with a small model takes 40 MB that it does
not share. These bytes count for replicas that the run did not plan for at its start."""
WORKER_BYTES = 400_000_000
"""Python and torch in a worker that computes, beside what its placement counts."""
TRAJECTORY_BYTES = 1000
"""Of the controller's memory, at least, for each trajectory of a batch."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one worker: on each of its GPUs, and on the host. `cache_bytes`: on each GPU, more than the
    worker needs, that a cache of its engine can use."""

    device_bytes: int
    host_bytes: int
    cache_bytes: int = 0


NOTHING = MemoryNeed(0, 0)

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of vLLM's slots for adapters."""


def slot_rank(rank: int) -> int:
    """The rank of the smallest slot for an adapter of `rank`."""
    return next(slot for slot in SLOT_RANKS if slot >= rank)


@dataclass(frozen=True)
class ServedModel:
    """A model, and the trajectories that a replica decodes with it. Bytes: of the weights as the engine
    computes with them, of a published version, of its largest tensor, and of the KV of a token on all devices
    together.
    `converts`: the computing format is not the published format.
    `packed_bytes`: of the packed copies of matrices that a CPU may keep, the output projection in float32.
    `adapter_bytes`: of the slot for an adapter that is computed beside the weights."""

    weights_bytes: int
    version_bytes: int
    largest_bytes: int
    kv_token_bytes: int
    slots: int
    max_sequence_tokens: int
    num_devices: int
    on_gpu: bool
    converts: bool
    packed_bytes: int
    adapter_bytes: int = 0

    @property
    def sequence_bytes(self) -> int:
        """KV of the longest sequence."""
        return self.kv_token_bytes * self.max_sequence_tokens


SCALE_BYTES = 4  # float32, one for each row of a quantised matrix


def quantised_bytes(shapes: Mapping[str, tuple[int, ...]], size: int) -> int:
    """Weights in fp8: one byte for each number of a layer's matrix. Embedding, head, norms and biases keep
    `size` bytes a number."""
    total = 0
    for name, shape in shapes.items():
        rounded = len(shape) > 1 and re.search(r"\.layers\.\d+\.", name) is not None
        total += math.prod(shape) + SCALE_BYTES * shape[0] if rounded else math.prod(shape) * size
    return total


def own_engine(model: ServedModel) -> MemoryNeed:
    """Served and standby weights, and KV of the longest sequence in every slot. On a CPU a packed copy of the
    served weights, at most. If the formats differ, pulled weights too. Then, and on a GPU, the
    largest tensor on the host, for digests."""
    computing = 2 * model.weights_bytes + model.packed_bytes + model.slots * model.sequence_bytes
    pulled = (model.version_bytes if model.converts else 0) + (
        model.largest_bytes if model.on_gpu or model.converts else 0
    )
    return _placed(model, computing, pulled)


def vllm(model: ServedModel) -> MemoryNeed:
    """One set of weights. A load goes through a second copy of one layer, at most of the largest tensor. An
    adapter beside the weights is in its slot, and on the host.

    On a GPU vLLM fills its share with pages of KV, and needs pages for one sequence of the longest length. If
    pages run out, it computes a trajectory again later. On a CPU it gets pages for every slot and one more.
    """
    weights = model.weights_bytes + model.largest_bytes + model.adapter_bytes
    if not model.on_gpu:
        return _placed(model, weights + (model.slots + 1) * model.sequence_bytes, model.adapter_bytes)
    pages = (model.slots - 1) * model.sequence_bytes
    return _placed(model, weights + model.sequence_bytes, model.adapter_bytes, pages)


def server(model: ServedModel) -> MemoryNeed:
    """Nothing: the server is no process of the run."""
    return NOTHING


def _placed(model: ServedModel, computing: int, host: int, cache: int = 0) -> MemoryNeed:
    """`computing` and `cache` are on the devices together, or on the host if there are none."""
    if not model.on_gpu:
        return MemoryNeed(0, computing + host)
    return MemoryNeed(-(-computing // model.num_devices), host, cache // model.num_devices)


# ---------------------------------------------------------------- by a model's dimensions alone


STATE_BYTES = 16
"""Per parameter and sharded: bf16 weight and gradient, float32 master weight and two Adam moments."""
CHECKPOINT_BYTES = 14
"""Per parameter: bf16 weight, float32 master weight and two Adam moments."""
ACTIVATION_BYTES = 34
"""Per token, layer and hidden unit with a fused attention and no recomputation (arXiv:2205.05198, eq. 2)."""
RECOMPUTED_BYTES = 2
"""The same with full recomputation: the layer's input alone (arXiv:2205.05198, section 5)."""
MEMORY_FRACTION = 0.9
"""Fraction of a device's memory for what a trainer keeps and computes, or for weights and KV (vLLM's default
`gpu_memory_utilization`)."""


def weights_bytes(parameters: int, dtype: str) -> int:
    return parameters * DTYPE_BYTES[dtype]


def kv_token_bytes(layers: int, kv_width: int, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return kv_bytes(layers, kv_width, DTYPE_BYTES[dtype])


def activation_bytes(tokens: int, layers: int, hidden: int, *, recompute: bool) -> float:
    """Activations of a micro-batch of `tokens` tokens, on all devices of a rank together."""
    per_unit = RECOMPUTED_BYTES if recompute else ACTIVATION_BYTES
    working = ACTIVATION_BYTES * tokens * hidden if recompute else 0
    return per_unit * tokens * hidden * layers + working


def trainer_bytes(parameters: int, activations: float, *, devices: int, model_parallel: int) -> float:
    """Per device: a share of the states, and of a micro-batch's activations."""
    return parameters * STATE_BYTES / devices + activations / model_parallel


def checkpoint_bytes(parameters: int) -> int:
    """Of a whole checkpoint."""
    return parameters * CHECKPOINT_BYTES


def usable_bytes(device_bytes: float) -> float:
    """What a trainer or a replica may use of a device's memory."""
    return MEMORY_FRACTION * device_bytes


def kv_room_bytes(device_bytes: float, devices: int, weights: int) -> float:
    """What the weights of a replica on `devices` devices leave for KV. Below 0: they do not fit."""
    return usable_bytes(device_bytes) * devices - weights
