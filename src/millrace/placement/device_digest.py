"""Digests of tensors, computed on the device that holds them: see `core.multilinear`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

from millrace.core.digest import MULTILINEAR
from millrace.core.multilinear import BLOCK_BYTES, KEYS, WORDS, block_sums, finished

Tensor = torch.Tensor

BAND = 1 << 13  # blocks at a time, 64 MiB: twice that is taken for products


class DeviceDigests:
    """Takes tensors, one after the other, and reads all their digests at once: so the device is waited for
    once. Between `take` and `read` nothing of a tensor is needed but what was taken."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._num_bytes: list[int] = []

    @torch.no_grad()
    def take(self, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.storage_offset() % 8 or flat.data_ptr() % 8:
            flat = flat.clone()
        whole = len(flat) - len(flat) % BLOCK_BYTES
        bands = list(flat[:whole].split(BAND * BLOCK_BYTES)) if whole else []
        if whole < len(flat):
            last = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
            last[: len(flat) - whole] = flat[whole:]
            bands.append(last)
        keys = _keys(flat.device)
        sums = [torch.stack(block_sums(b.view(torch.int64).view(-1, WORDS), keys), dim=1) for b in bands]
        self._sums.append(torch.cat([torch.empty((0, 2), dtype=torch.int64, device=flat.device), *sums]))
        self._num_bytes.append(len(flat))

    def read(self) -> list[str]:
        """In the order of taking; of the kind MULTILINEAR."""
        if not self._sums:
            return []
        blocks = np.cumsum([len(sums) for sums in self._sums])[:-1]
        each = np.split(torch.cat(self._sums).cpu().numpy(), blocks)
        return [
            MULTILINEAR + finished(sums, num_bytes)
            for sums, num_bytes in zip(each, self._num_bytes, strict=True)
        ]


def tensor_digests(tensors: Iterable[Tensor]) -> list[str]:
    digests = DeviceDigests()
    for tensor in tensors:
        digests.take(tensor)
    return digests.read()


@lru_cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(KEYS.view(np.int64)).to(device)
