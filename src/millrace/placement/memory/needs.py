"""The memory and disk that a run needs, from the model directory alone. No tensor is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.config.schema import Config
from millrace.config.tables.training import Adapter, TrainerSection
from millrace.core.errors import ConfigError
from millrace.placement.memory.activation_memory import ActivationMemory, estimate
from millrace.placement.memory.engine_memory import (
    CONTEXT_BYTES,
    NOTHING,
    MemoryNeed,
    ServedModel,
    own_engine,
    quantised_bytes,
    slot_rank,
)
from millrace.placement.memory.model_shape import DTYPE_BYTES, Shape, kv_token_bytes, shape_of
from millrace.placement.model_directory import (
    adapter_shapes,
    read_model_config,
    tensor_elements,
    tensor_shapes,
)
from millrace.placement.number_format import computing_dtype

COPY_BYTES = 4  # float32 per parameter: master weight, gradient, reference, weights rounded as published
MOMENTS_BYTES = {"float32": 8.0, "8bit": 2 * (1 + 4 / 256)}  # both of AdamW's, with the scale of each block


@dataclass(frozen=True)
class Needs:
    """Bytes. `checkpoint_bytes` is of one checkpoint. `activation_memory` comes on top of the memory that
    workers keep, and is only estimated. Python's own memory is not counted."""

    num_parameters: int
    weights_bytes: int
    kv_token_bytes: int
    trainer: MemoryNeed
    replica: MemoryNeed
    checkpoint_bytes: int
    activation_memory: ActivationMemory
    reference: MemoryNeed = NOTHING

    def processes_bytes(self, replicas: int) -> int:
        """Host memory of the trainer and `replicas`, without shared memory."""
        return self.trainer.host_bytes + replicas * self.replica.host_bytes

    def turn_bytes(self, replicas: int) -> int:
        """As `processes_bytes`, of the larger turn where both sides share their devices. A trainer that
        sleeps on a GPU is in the memory of the host; one that sleeps on a CPU is in a file."""
        asleep = self.trainer.device_bytes
        return max(self.trainer.host_bytes, asleep + replicas * self.replica.host_bytes)


def read_needs(
    config: Config, *, on_gpu: bool, replica_memory: Callable[[ServedModel], MemoryNeed] = own_engine
) -> Needs:
    """The memory that each worker keeps, and the activation memory. `replica_memory`: of the run's engine.

        trainer   16 bytes a parameter, 10 with 8-bit moments; 4 more for a reference, and 4 a parameter of
                  a teacher. One version for publishing, if master weights are on the host and not float32.
                  With an adapter its own numbers count as parameters, and the model takes 4 bytes each. In
                  bfloat16, 4 bytes for each weight that is rounded for a step, and 4 on the host for a
                  checkpoint of these weights. They are all weights if the CPU computes in float32, else the
                  embedding and the last norm. The rest of a checkpoint needs no copy
        replica   the memory of its engine (`engine_memory`). Each of `rollout.tensor` GPUs has an equal share
                  of weights and KV, and at least one head of KV
        reference 4 bytes a parameter, if the reference has a process of its own (`algorithm.reference`)

    Ranks of the trainer divide all memory that it keeps. With `trainer.offload` all of it is on the host. A
    standby takes CONTEXT_BYTES of each GPU of the trainer, and buffers of NCCL come on top.

    Raises: DataError: the model directory cannot be read. ConfigError: `rollout.tensor`, `trainer.tensor` or
    `trainer.sequence` does not divide the model, or the model can have no such adapter.
    """
    directory, size = Path(config.model.path), DTYPE_BYTES[config.model.dtype]
    tensors = tensor_elements(directory)
    parameters = sum(tensors.values())
    computing = DTYPE_BYTES[computing_dtype(config.model.dtype, on_gpu=on_gpu)]
    model, num_devices = read_model_config(directory), config.rollout.tensor
    shape = shape_of(model, tensors)
    _check_division(shape, num_devices, "`rollout.tensor`")
    _check_ranks(shape, config.trainer)
    quantised = config.rollout.quantization is not None
    serving = size if quantised else computing  # a quantised replica rounds what it is given, on any CPU
    kv_size = serving if on_gpu or config.rollout.engine != "own" else 4  # a CPU keeps float32
    kv_token = num_devices * kv_token_bytes(model, kv_size, num_devices)
    adapted = config.adapter.rank is not None
    trained = adapter_elements(directory, config.adapter) if adapted else parameters
    frozen = (parameters if adapted or _has_reference(config) else 0) + _teacher_elements(config)
    outside = shape.other_weights - shape.head_weights
    rounded = 0 if size == 4 else trained if computing == 4 or adapted else outside
    moments = int(trained * MOMENTS_BYTES[config.optimizer.states])
    states = COPY_BYTES * (2 * trained + frozen + rounded) + moments
    version = trained * size
    hosted = not on_gpu or config.trainer.offload
    staged = COPY_BYTES * rounded + (version if hosted and size != 4 else 0)
    each = 0 if hosted else -(-states // config.trainer.ranks)
    each += CONTEXT_BYTES if on_gpu and config.trainer.standby else 0
    trainer = MemoryNeed(each, staged + (states if hosted else 0))
    served = ServedModel(
        weights_bytes=quantised_bytes(tensor_shapes(directory), size) if quantised else parameters * serving,
        version_bytes=parameters * size,
        largest_bytes=shape.largest_weight * size,
        kv_token_bytes=kv_token,
        slots=config.rollout.slots,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        num_devices=num_devices,
        on_gpu=on_gpu,
        converts=serving != size,
        packed_bytes=0 if on_gpu else parameters * serving + 2 * (4 - serving) * shape.projection,
        adapter_bytes=_native_adapter_bytes(config, computing),
    )
    return Needs(
        num_parameters=parameters,
        weights_bytes=version,
        kv_token_bytes=kv_token,
        trainer=trainer,
        replica=replica_memory(served),
        checkpoint_bytes=trained * COPY_BYTES + moments,
        activation_memory=estimate(config, shape, computing, on_gpu=on_gpu),
        reference=_reference(parameters, on_gpu=on_gpu) if config.reference_apart else NOTHING,
    )


def disk_bytes(config: Config, needs: Needs, checkpoints: int) -> int:
    """What a run writes at most: `checkpoints`, the exported model, and files of versions for servers without
    a directory of their own, one for each and one that is being written."""
    rollout = config.rollout
    handed = 0 if rollout.shared_dir else len(rollout.servers)
    models = 1 + handed + (handed > 0)
    return (
        checkpoints * needs.checkpoint_bytes + models * needs.num_parameters * DTYPE_BYTES[config.model.dtype]
    )


def _reference(parameters: int, *, on_gpu: bool) -> MemoryNeed:
    weights_bytes = COPY_BYTES * parameters
    return MemoryNeed(weights_bytes, 0) if on_gpu else MemoryNeed(0, weights_bytes)


def _teacher_elements(config: Config) -> int:
    path = config.teacher
    return 0 if path is None else sum(tensor_elements(Path(path)).values())


def _has_reference(config: Config) -> bool:
    """Whether the trainer has a reference. For a user's own algorithm only the trainer knows."""
    a = config.policy_gradient
    return a is not None and a.kl > 0 and not config.reference_apart


def adapter_elements(directory: Path, adapter: Adapter) -> int:
    """How many numbers an adapter has. Raises: as `adapter_shapes`."""
    rank, dora = adapter.rank or 0, adapter.kind == "dora"
    shapes = adapter_shapes(directory, adapter).values()
    return sum(rank * (outputs + inputs) + dora * outputs for outputs, inputs in shapes)


def _native_adapter_bytes(config: Config, size: int) -> int:
    if not config.rollout.native_adapters:
        return 0
    shapes = adapter_shapes(Path(config.model.path), config.adapter).values()
    return slot_rank(config.adapter.rank or 0) * size * sum(map(sum, shapes))


def _check_ranks(shape: Shape, trainer: TrainerSection) -> None:
    """Raises: ConfigError: a rank would have a fraction of a head."""
    _check_division(shape, trainer.tensor, "`trainer.tensor`")
    each = trainer.tensor * trainer.sequence
    if shape.query_heads % each or shape.kv_heads % each:
        raise ConfigError(
            f"`trainer.tensor` ({trainer.tensor}) x `trainer.sequence` ({trainer.sequence}) ranks cannot "
            f"share a layer: it has {shape.query_heads} attention heads and {shape.kv_heads} key heads.\n"
            f"  Take a divisor of {math.gcd(shape.query_heads, shape.kv_heads)}, and more `trainer.shard`"
        )


def _check_division(shape: Shape, num_devices: int, key: str) -> None:
    """Raises: ConfigError: a device would have a fraction of a head. Several devices may have one key
    head."""
    sizes = {"attention heads": shape.query_heads, "intermediate columns": shape.intermediate}
    if num_devices < shape.kv_heads or num_devices % shape.kv_heads:
        sizes["key heads"] = shape.kv_heads
    undivided = [f"{size} {name}" for name, size in sizes.items() if size % num_devices]
    if undivided:
        raise ConfigError(
            f"{key} ({num_devices}) devices cannot share the model: it has {', '.join(undivided)} a "
            f"layer.\n  Take a divisor of {math.gcd(*sizes.values())}"
        )
