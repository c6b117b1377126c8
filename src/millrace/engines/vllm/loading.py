"""A version from the relay's memory into vLLM's model, in each of its worker processes.

vLLM's own loader fuses the tensors, takes this rank's part and packs them. It reads the relay's memory: there
is no other copy on the host.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch

from millrace.core.digest import NamedBuffer
from millrace.core.errors import UnknownVersionError
from millrace.core.protocols import WeightsReader


def load_version(worker: Any, reader: WeightsReader, version: int, digest: str) -> list[Exception]:
    """Run by `collective_rpc` with a vLLM worker, in its process. `digest`: under which it was staged.

    Returns: nothing, or what went wrong: UnknownVersionError (nothing has changed), TornVersionError (the
    model is of no version now) or what vLLM raised (neither). It is not raised, nor returned bare: of such an
    error vLLM tells only the words, and takes the other workers' answers for those to its next question.
    """
    try:
        with reader.view(version) as (found, pieces):
            if found != digest:
                raise UnknownVersionError(f"version {version} was staged anew: {found}, not {digest}")
            worker.reload_weights(weights_iterator=((piece.name, as_tensor(piece)) for piece in pieces))
        _pack_heads_again(worker.model_runner.get_model())
    except Exception as error:
        return [error]
    return []


def as_tensor(piece: NamedBuffer) -> torch.Tensor:
    """The tensor where the piece lies, to be read only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(piece.data, dtype=getattr(torch, piece.dtype)) if len(piece.data) else None
    return torch.empty(piece.shape) if flat is None else flat.view(piece.shape)


def _pack_heads_again(model: torch.nn.Module) -> None:
    """A head that is tied to the embedding has no tensor of its own in a version. So a reload leaves what the
    CPU multiplies with, a packed copy, as it was."""
    for module in model.modules():
        name, layer = type(module).__name__, cast(Any, module)
        if name in ("ParallelLMHead", "VocabParallelEmbedding") and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
