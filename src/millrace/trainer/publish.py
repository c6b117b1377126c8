"""The current weights as bytes, ready to be copied into a relay's slot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from millrace.core.digest import NamedBuffer

MANIFEST_BYTES = 4096  # room in a slot beside the tensors ...
MANIFEST_BYTES_PER_TENSOR = 256  # ... and for each tensor's name, shape, digest and alignment
PAGE_BYTES = 4096


class PublishBuffers:
    """Preallocated host copies of the weights in the published dtype.

    A weight that is on the CPU in that dtype already is published from where it lies. Fresh pages are
    ten times slower than warm ones, so nothing is allocated per version.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._weights = dict(weights)
        self._host = {name: _host_copy(_whole(tensor), dtype) for name, tensor in weights.items()}
        self._buffers = [
            NamedBuffer(
                name,
                str(dtype).removeprefix("torch."),
                tuple(host.shape),
                host.view(-1).view(torch.uint8).numpy(),
            )
            for name, host in self._host.items()
        ]

    @property
    def weights_bytes(self) -> int:
        return sum(buffer.data.nbytes for buffer in self._buffers)

    @property
    def slot_bytes(self) -> int:
        """What one version needs in a slot, its manifest included: whole pages."""
        needed = self.weights_bytes + MANIFEST_BYTES + MANIFEST_BYTES_PER_TENSOR * len(self._buffers)
        return -(-needed // PAGE_BYTES) * PAGE_BYTES

    def fill(self) -> list[NamedBuffer]:
        """Bring the buffers up to the current weights. They stay valid until the next step."""
        for name, tensor in self._weights.items():
            source = _whole(tensor)
            if source.data_ptr() != self._host[name].data_ptr():
                self._host[name].copy_(source)
        return self._buffers


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of one that ranks divide, every rank gets all: a collective call."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
