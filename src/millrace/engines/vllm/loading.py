"""A version from the relay's memory into vLLM's model, in each of its worker processes, and the memory of a
worker where the device is lent in shifts: the next load fills what is taken again.

vLLM's own loader fuses the tensors, takes this rank's block and packs it. The loader reads the relay's
memory, each byte of this rank's block once: there is no other copy on the host. A GPU copies from there
directly.

On a GPU vLLM's own sleep mode gives back the memory. vLLM's worker for a CPU ignores sleep mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from millrace.core.digest import NamedBuffer
from millrace.core.errors import UnknownVersionError
from millrace.core.protocols import WeightsReader
from millrace.devices.gpu import has_own_memory
from millrace.devices.pinned import pinned
from millrace.devices.released_memory import ReleasedMemory
from millrace.devices.served_weights import Base
from millrace.engines.vllm.adapter_slot import has_slot, open_slot, replace_adapter
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
