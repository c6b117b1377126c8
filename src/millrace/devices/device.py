"""The torch device of a worker, and the number format that the worker computes in."""

from __future__ import annotations

import torch

from millrace.core.errors import ConfigError
from millrace.placement import number_format
from millrace.placement.memory.engine_memory import CONTEXT_BYTES


def torch_device(device: str = "auto", share: float = 1.0) -> torch.device:
    """`cpu`, `cuda` (the first GPU that the process sees), `cuda:N`, or `auto`: cuda if there is a GPU.

    `share`: the fraction of its memory that this process may take. torch refuses more, so that no worker
    takes another worker's share.
    Raises: ConfigError: there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        opened = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"`model.device` ({device!r}) cannot be used here: {str(error).splitlines()[0]}\n"
            "  Set it to cpu, or to auto, which takes a GPU where there is one"
        ) from error
    if opened.index:
        torch.cuda.set_device(opened)  # for code that opens the current device
    if opened.type == "cuda" and share < 1:
        total_bytes = torch.cuda.get_device_properties(opened).total_memory
        torch.cuda.set_per_process_memory_fraction(share - CONTEXT_BYTES / total_bytes, opened)
    return opened


def computing_dtype(published: torch.dtype, device: torch.device) -> torch.dtype:
    """The format of matmuls with weights that are published in `published`: see `number_format`."""
    name = str(published).removeprefix("torch.")
    computing: torch.dtype = getattr(torch, number_format.computing_dtype(name, on_gpu=device.type != "cpu"))
    return computing


def computes(published: torch.dtype, computing: torch.dtype) -> str:
    """The number format in words, for the people who watch a run."""
    weights = "" if computing == published else f" ({published} weights: this CPU is slow in that)"
    return f"{computing}{weights}".replace("torch.", "")
