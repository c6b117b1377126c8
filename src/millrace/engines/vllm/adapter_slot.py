"""vLLM's slot for an adapter that it computes beside the base weights (LoRA).

There is one slot, and every request names it. A load replaces the adapter in the slot. So requests that are
running go on under the new adapter, as they do under new weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from millrace.core.errors import ConfigError
from millrace.devices.low_rank import BASE, DOWN, UP
from millrace.placement.memory.engine_memory import slot_rank
from millrace.rollout.protocol import NativeAdapter

Factors = tuple[torch.Tensor, torch.Tensor]
"""A and B of a layer: (rank, inputs) and (outputs, rank)."""

SLOT = 1
"""The adapter's number in vLLM."""


def slot_arguments(adapter: NativeAdapter) -> dict[str, Any]:
    """vLLM's arguments for the slot."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": slot_rank(adapter.rank),
        "lora_target_modules": list(adapter.targets),
    }


def lora_request() -> Any:
    """Names the adapter in the slot. vLLM finds it there, and reads no file."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("published", SLOT, "in-memory")


def open_slot(worker: Any, weights: Iterable[str], adapter: NativeAdapter) -> None:
    """From now on the slot of this vLLM worker gets such adapters, of a model with these `weights`.

    Raises: ConfigError: vLLM has no place for some of the matrices. It would leave them out."""
    matrices = (name.removesuffix(".weight") for name in weights if ".layers." in name)
    wanted = {name for name in matrices if name.rpartition(".")[2] in adapter.targets}
    manager = _manager(worker)
    parts = (name for names in manager.packed_modules.values() for name in names)
    if unable := sorted(wanted - (manager.modules.keys() - manager.packed_modules.keys()).union(parts)):
        raise ConfigError(
            f"vLLM has no place for an adapter of {', '.join(unable[:4])}.\n"
            "  Set `rollout.native_adapters` to false: then adapters are merged"
        )
    worker.millrace_adapter = adapter


def has_slot(worker: Any) -> bool:
    return hasattr(worker, "millrace_adapter")


def replace_adapter(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the adapter with these published `tensors` into the slot of a vLLM worker."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    manager, scale = _manager(worker), worker.millrace_adapter.scale
    loras = {
        layer: LoRALayerWeights(layer, len(down), 0, down, up, scaling=scale)
        for layer, (down, up) in factors(tensors, manager.lora_config.lora_dtype).items()
    }
    manager.remove_adapter(SLOT)
    manager.add_adapter(LoRAModel(SLOT, worker.millrace_adapter.rank, loras))
    manager.activate_adapter(SLOT)


def factors(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Factors]:
    """Copies of A and B, by the name of their layer."""
    layers = sorted({name.rpartition(".")[0] for name in tensors if name != BASE})
    return {
        layer: (
            tensors[f"{layer}.{DOWN}"].to(dtype, copy=True),
            tensors[f"{layer}.{UP}"].to(dtype, copy=True),
        )
        for layer in layers
    }


def _manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager
