"""A version from the relay's memory into vLLM's model, in each of its worker processes.

vLLM's own loader fuses the tensors, takes this rank's block and packs it. The loader reads the relay's
memory, each byte of this rank's block once: there is no other copy on the host. A GPU copies from there
directly.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch

from millrace.core.digest import NamedBuffer
from millrace.core.errors import UnknownVersionError
from millrace.core.protocols import WeightsReader
from millrace.devices.gpu import has_own_memory
from millrace.devices.pinned import pinned


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
            worker.reload_weights(weights_iterator=((buffer.name, as_tensor(buffer)) for buffer in buffers))
        _pack_heads_again(worker.model_runner.get_model())
    except Exception as error:
        return [error]
    return []


def as_tensor(buffer: NamedBuffer) -> torch.Tensor:
    """A read-only tensor in the buffer's memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(buffer.data, dtype=getattr(torch, buffer.dtype)) if len(buffer.data) else None
    return torch.empty(buffer.shape) if flat is None else flat.view(buffer.shape)


def _pack_heads_again(model: torch.nn.Module) -> None:
    """A version has no tensor of a head that is tied to the embedding. So a reload does not change the packed
    copy that the CPU multiplies with."""
    for module in model.modules():
        name, layer = type(module).__name__, cast(Any, module)
        if name in ("ParallelLMHead", "VocabParallelEmbedding") and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
