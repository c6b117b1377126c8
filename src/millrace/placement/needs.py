"""The memory and disk that a run needs, from the model directory alone. No tensor is loaded."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from millrace.config.schema import Config
from millrace.config.tables.training import Adapter, TrainerSection
from millrace.core.errors import ConfigError, DataError, boundary
from millrace.core.supported import NORMS_AFTER, SINKS
from millrace.placement.activation_memory import ActivationMemory, Shape, estimate
from millrace.placement.engine_memory import (
    NOTHING,
    MemoryNeed,
    ServedModel,
    own_engine,
    quantised_bytes,
    slot_rank,
)
from millrace.placement.number_format import computing_dtype

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
COPY_BYTES = 4  # float32 per parameter: master weight, gradient, reference, weights rounded as published
STANDBY_BYTES = 500_000_000  # CUDA's context of a second process; buffers of NCCL come on top
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
    standby takes STANDBY_BYTES of each GPU of the trainer.

    Raises: DataError: the model directory cannot be read. ConfigError: `rollout.tensor`, `trainer.tensor` or
    `trainer.sequence` does not divide the model, or the model can have no such adapter.
    """
    directory, size = Path(config.model.path), DTYPE_BYTES[config.model.dtype]
    tensors = tensor_elements(directory)
    parameters = sum(tensors.values())
    computing = DTYPE_BYTES[computing_dtype(config.model.dtype, on_gpu=on_gpu)]
    model, num_devices = read_model_config(directory), config.rollout.tensor
    shape = _shape(model, tensors)
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
    each += STANDBY_BYTES if on_gpu and config.trainer.standby else 0
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


def tensor_elements(directory: Path) -> dict[str, int]:
    """Elements of each tensor, from the headers of the safetensors files."""
    return {name: math.prod(shape) for name, shape in tensor_shapes(directory).items()}


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


def adapter_shapes(directory: Path, adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """(outputs, inputs) of each matrix that gets an adapter. Raises: ConfigError: the model can have no such
    adapter."""
    matrices = {n.removesuffix(".weight"): s for n, s in tensor_shapes(directory).items() if len(s) > 1}
    return {name: matrices[name] for name in adapter.layers(matrices)}


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for file in weight_files(directory) for name, shape in _shapes(file).items()}


def weight_files(directory: Path) -> list[Path]:
    """The files that are loaded. A repository may have the same weights in other files too."""
    if indexed := indexed_files(directory):
        return indexed
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError(f"{directory} has no *.safetensors file")
    return files


def indexed_files(directory: Path) -> list[Path]:
    """The files that the directory's index names; empty if there is no index.

    Raises: DataError: the index has no place for a tensor, or names a file that is no safetensors file in the
    directory and so not part of the model.
    """
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return []
    with boundary("`model.path`", f"{index} does not say where each tensor is", DataError):
        names = sorted({*json.loads(index.read_text())["weight_map"].values()})
        outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise DataError(
            f"{index} names {outside[0]!r}: weights must be *.safetensors files in {directory} itself.\n"
            "  What lies elsewhere is not part of the model: put the file there, and name it without a folder"
        )
    return [directory / name for name in names]


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is not a safetensors file: {error}") from error


def read_model_config(directory: Path) -> dict[str, Any]:
    with boundary("model", f"cannot read {directory / 'config.json'}", DataError):
        return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))


def kv_token_bytes(model: dict[str, Any], size: int, num_devices: int = 1) -> int:
    """Keys and values of one token in all layers, on one of `num_devices` devices. Raises: DataError: `model`
    is not of a decoder."""
    shape = _shape(model, {})
    return 2 * shape.layers * max(1, shape.kv_heads // num_devices) * shape.head_dim * size


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


def _shape(model: dict[str, Any], tensors: dict[str, int]) -> Shape:
    """The shape of a model. If `model` has no vocabulary, the largest tensor counts as the embedding."""
    layers, largest = Counter[str](), max(tensors.values(), default=0)
    for name, elements in tensors.items():
        layers["".join(re.findall(r"\.layers\.\d+\.", name))] += elements
    other = layers.pop("", 0)
    heads, hidden = _count(model, "num_attention_heads"), _count(model, "hidden_size")
    routed = model.get("num_experts_per_tok") or 0
    clamped = model.get("model_type") == "gpt_oss"  # `intermediate_size` is of one expert
    return Shape(
        layers=_count(model, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_count(model, "intermediate_size", 4 * hidden) * (routed if clamped else 1),
        vocabulary=_count(model, "vocab_size", max(1, largest // hidden)),
        query_heads=heads,
        kv_heads=_count(model, "num_key_value_heads", heads),
        head_dim=_count(model, "head_dim", hidden // heads),
        layer_weights=max(layers.values(), default=0),
        other_weights=other,
        largest_weight=largest,
        routed=routed,
        norms_after=model.get("model_type") in NORMS_AFTER,
        clamped=clamped,
        composed=bool(model.get("attn_logit_softcapping")) or model.get("model_type") in SINKS,
    )


def _count(model: dict[str, Any], key: str, default: int | None = None) -> int:
    count = model.get(key) or default
    if count is None:
        raise DataError(f"the model's config.json has no {key!r}: is it a decoder model?")
    if type(count) is not int or count < 1:
        raise DataError(
            f"the model's config.json has {count!r} as {key!r}: it must be a whole number above 0"
        )
    return count
