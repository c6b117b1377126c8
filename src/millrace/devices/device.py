"""The torch device that a worker was given, and the number format it computes in there."""

from __future__ import annotations

import torch

from millrace.core.errors import ConfigError
from millrace.placement import number_format
from millrace.placement.assign import CONTEXT_BYTES


def torch_device(device: str = "auto", share: float = 1.0) -> torch.device:
    """`cpu`, `cuda` (the first GPU that the process sees), `cuda:N`, or `auto`: cuda where there is one.

    `share`: of its memory, what this process may take. torch refuses what goes beyond, so that no worker
    takes what was given to another.
    Raises: ConfigError: there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"`model.device` ({device!r}) cannot be used here: {str(error).splitlines()[0]}\n"
            "  Set it to cpu, or to auto, which takes a GPU where there is one"
        ) from error
    if found.index:
        torch.cuda.set_device(found)  # for what opens the present device unasked
    if found.type == "cuda" and share < 1:
        total_bytes = torch.cuda.get_device_properties(found).total_memory
        torch.cuda.set_per_process_memory_fraction(share - CONTEXT_BYTES / total_bytes, found)
    return found


def computing_dtype(published: torch.dtype, device: torch.device) -> torch.dtype:
    """The format for products of weights that are published in `published`: see `number_format`."""
    name = str(published).removeprefix("torch.")
    computing: torch.dtype = getattr(torch, number_format.computing_dtype(name, on_gpu=device.type != "cpu"))
    return computing


def computes(published: torch.dtype, computing: torch.dtype) -> str:
    """In words, for the people who watch a run."""
    weights = "" if computing == published else f" ({published} weights: this CPU is slow in that)"
    return f"{computing}{weights}".replace("torch.", "")
