"""How much memory and disk a run needs, from the model directory alone: no tensor is loaded."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config.schema import Config
from millrace.core.errors import DataError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
TRAINER_BYTES = 16  # float32 per parameter: master weight, gradient, two Adam moments
CHECKPOINT_BYTES = 12  # master weight and the two moments


@dataclass(frozen=True)
class Estimate:
    """Bytes. `checkpoint_bytes` is of one checkpoint; activations are not counted."""

    num_parameters: int
    weights_bytes: int
    kv_token_bytes: int
    kv_replica_bytes: int
    replica_bytes: int
    trainer_bytes: int
    relay_bytes: int
    total_bytes: int
    checkpoint_bytes: int


def estimate(config: Config) -> Estimate:
    """Memory of all processes together.

        replica = 2 weights (served and standby) + slots * max_sequence_tokens * KV of a token
        trainer = 16 bytes a parameter + one version in the published dtype
        relay   = slots * weights

    Raises: DataError: the model directory cannot be read.
    """
    directory = Path(config.model.path)
    size = DTYPE_BYTES[config.model.dtype]
    parameters = num_parameters(directory)
    weights = parameters * size
    kv_token = kv_token_bytes(read_model_config(directory), size)
    kv_replica = kv_token * config.rollout.slots * config.rollout.max_sequence_tokens
    replica = 2 * weights + kv_replica
    trainer = parameters * TRAINER_BYTES + weights
    relay = config.relay_slots * weights
    return Estimate(
        num_parameters=parameters,
        weights_bytes=weights,
        kv_token_bytes=kv_token,
        kv_replica_bytes=kv_replica,
        replica_bytes=replica,
        trainer_bytes=trainer,
        relay_bytes=relay,
        total_bytes=config.rollout.replicas * replica + trainer + relay,
        checkpoint_bytes=parameters * CHECKPOINT_BYTES,
    )


def num_parameters(directory: Path) -> int:
    """Elements of all tensors, from the headers of the safetensors files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError(f"{directory} has no *.safetensors file")
    tensors = (entry for path in files for name, entry in _header(path).items() if name != "__metadata__")
    return sum(math.prod(entry["shape"]) for entry in tensors)


def _header(path: Path) -> dict[str, Any]:
    """Eight bytes of little-endian length, then JSON: name -> dtype, shape, offsets."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return dict(json.loads(file.read(length)))
    except (OSError, ValueError, struct.error, MemoryError, OverflowError) as error:
        raise DataError(f"{path} is not a safetensors file: {error}") from error


def read_model_config(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {directory / 'config.json'}: {error}") from error


def kv_token_bytes(model: dict[str, Any], size: int) -> int:
    """Keys and values of one token in all layers."""
    try:
        heads = model["num_attention_heads"]
        kv_heads = model.get("num_key_value_heads") or heads
        head_dim = model.get("head_dim") or model["hidden_size"] // heads
        return int(2 * model["num_hidden_layers"] * kv_heads * head_dim * size)
    except KeyError as error:
        raise DataError(f"the model's config.json has no {error}: is it a decoder model?") from None
