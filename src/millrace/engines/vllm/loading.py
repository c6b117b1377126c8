"""A version from the relay's memory into vLLM's model, in each of its worker processes, or into its slot for
an adapter that it computes beside the base weights (LoRA). Where the device is lent in shifts, the next
load fills what is taken again.

vLLM's own loader fuses the tensors, takes this rank's block and packs it. The loader reads the relay's
memory, each byte of this rank's block once: there is no other copy on the host. A GPU copies from there
directly.

On a GPU vLLM's own sleep mode gives back the memory. vLLM's worker for a CPU ignores sleep mode.

There is one slot for an adapter, and every request names it. A load replaces the adapter in the slot. So
requests that are running go on under the new adapter, as they do under new weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from millrace.core.digest import NamedBuffer
from millrace.core.errors import ConfigError, UnknownVersionError
from millrace.core.protocols import WeightsReader
from millrace.devices.gpu import has_own_memory
from millrace.devices.low_rank import BASE, DOWN, UP
from millrace.devices.pinned import pinned
from millrace.devices.released_memory import ReleasedMemory
from millrace.devices.served_weights import Base
from millrace.placement.memory.engine_memory import slot_rank
from millrace.rollout.protocol import NativeAdapter

Named = Iterable[tuple[str, torch.Tensor]]
SINKS = ".sinks"
EXPERTS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
"""Names of gpt-oss's experts, in versions and for vLLM's loader of single experts."""


def load_version(worker: Any, reader: WeightsReader, version: int, digest: str) -> list[Exception]:
    """Load `version`. `collective_rpc` calls this with a vLLM worker, in the worker's process.

    `digest`: of the staged version.
    Returns: the error, if any: UnknownVersionError (nothing has changed), TornVersionError (the model is of
    no version now) or an error of vLLM (either). The error is not raised and not returned bare. vLLM would
    pass on only its words, and would take the other workers' answers for answers to its next call.
    """
    try:
        if has_own_memory(worker.device):
            reader.pin(pinned)
        with reader.view(version) as (staged, buffers):
            if staged != digest:
                raise UnknownVersionError(f"version {version} was staged anew: {staged}, not {digest}")
            tensors = {buffer.name: as_tensor(buffer) for buffer in buffers}
            if has_slot(worker):
                replace_adapter(worker, tensors)
            else:
                _reload(worker, tensors.items())
    except Exception as error:
        return [error]
    return []


def load_base(worker: Any, base: Base, adapter: NativeAdapter) -> list[Exception]:
    """Load the base weights, beside which a vLLM worker computes adapters from now on. `collective_rpc` calls
    this. Returns: the error, if any: ConfigError (vLLM cannot adapt some of the matrices), or vLLM's."""
    try:
        open_slot(worker, base.names, adapter)
        _reload(worker, ((name, base[name]) for name in base.names))
    except Exception as error:
        return [error]
    return []


def _reload(worker: Any, tensors: Named) -> None:
    if worker.model_runner.model_config.hf_config.model_type == "gpt_oss":
        _reload_gpt_oss(worker, tensors)
    else:
        worker.reload_weights(weights_iterator=tensors)
    _pack_again(worker.model_runner.get_model())


def _reload_gpt_oss(worker: Any, tensors: Named) -> None:
    """vLLM's own reload leaves experts and sinks as they were: it writes them into parameters that have no
    memory then. Experts one by one are loaded right. This rank's sinks are copied afterwards."""
    from vllm.distributed import get_tensor_model_parallel_rank

    sinks: dict[str, torch.Tensor] = {}
    worker.reload_weights(weights_iterator=_one_by_one(tensors, sinks))
    rank = get_tensor_model_parallel_rank()
    for name, own in worker.model_runner.get_model().named_parameters():
        if name.endswith(SINKS):
            own.data.copy_(sinks[name.replace(".attn.", ".self_attn.")].split(len(own))[rank])


def _one_by_one(tensors: Named, sinks: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts one by one, and all other tensors, but sinks, which are put aside."""
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".")
        if name.endswith(SINKS):
            sinks[name] = tensor
        elif stem.endswith(".experts"):
            yield from ((f"{stem}.{index}.{EXPERTS[kind]}", expert) for index, expert in enumerate(tensor))
        else:
            yield name, tensor


def as_tensor(buffer: NamedBuffer) -> torch.Tensor:
    """A read-only tensor in the buffer's memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(buffer.data, dtype=getattr(torch, buffer.dtype)) if len(buffer.data) else None
    return torch.empty(buffer.shape) if flat is None else flat.view(buffer.shape)


def _pack_again(model: torch.nn.Module) -> None:
    """Two packed copies that a CPU multiplies with do not change in a reload. Of a head that is tied to the
    embedding, because a version has no tensor of it. Of experts, because vLLM packs them only once."""
    for module in model.modules():
        name, layer = type(module).__name__, cast(Any, module)
        method: Any = getattr(layer, "quant_method", None)
        if name in ("ParallelLMHead", "VocabParallelEmbedding") and hasattr(layer, "cpu_linear"):
            method.process_weights_after_loading(layer)
        elif type(method).__name__ == "UnquantizedFusedMoEMethod" and layer.w13_weight.device.type == "cpu":
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)


# ---------------------------------------------------------------- memory


def release(worker: Any) -> None:
    """Give back the memory of weights, keys and values. `collective_rpc` calls this with a vLLM worker, in
    the worker's process. Nothing of a request may be in the cache."""
    if has_own_memory(worker.device):
        worker.sleep(level=2)
        return
    model = worker.model_runner.get_model()
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            cast(Any, module).cpu_linear = None  # has packed weights; a load packs anew
    tensors = [*model.parameters(), *worker.model_runner.kv_caches]
    worker.millrace_released = ReleasedMemory(tensors, device_type=worker.device.type)


def take_again(worker: Any) -> None:
    """Take what `release` gave back. The model has no weights before the next load."""
    if has_own_memory(worker.device):
        worker.wake_up()
    else:
        worker.millrace_released.take_again()


# ---------------------------------------------------------------- the slot for an adapter


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
