"""A device with memory of its own, on a CPU: what is written for GPUs runs here as it would there."""

from __future__ import annotations

import pytest
import torch

from millrace.devices import pinned
from millrace.engines.own import parameters, torch_engine


class Runtime:
    """CUDA's, of one process: what is registered, and whether it refuses."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered, self.forgotten = code, dict[int, tuple[int, int]](), 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.code == 0:
            assert address not in self.registered
            self.registered[address] = num_bytes, flags
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def runtime(patch: pytest.MonkeyPatch) -> Runtime:
    """What `torch.cuda.cudart` gives from here on."""
    made = Runtime()
    patch.setattr(torch.cuda, "cudart", lambda: made)

    def forget() -> None:
        made.forgotten += 1

    patch.setattr(pinned, "_forget_error", forget)
    return made


def install(patch: pytest.MonkeyPatch) -> Runtime:
    """Engines made from here on get weights as a GPU does."""
    for module in (torch_engine, parameters):
        patch.setattr(module, "has_own_memory", lambda _: True)
    return runtime(patch)
