"""Digests of tensors, computed on the device that holds them: see `core.multilinear`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

from millrace.core.digest import MULTILINEAR
from millrace.core.multilinear import BLOCK_BYTES, KEYS, WORDS, block_sums, finished

Tensor = torch.Tensor

BAND = 1 << 11  # blocks at a time, 16 MiB; the products take three times that


def tensor_digests(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[str]:
    """The digest of each tensor, of the kind MULTILINEAR, rounded to `dtype` if given. All digests are read
    at once, so the host waits for the device once."""
    sums, sizes = list[Tensor](), list[int]()
    for tensor in tensors:
        sums.append(_sums(tensor.detach(), dtype or tensor.dtype))
        sizes.append(tensor.numel() * (dtype or tensor.dtype).itemsize)
    if not sums:
        return []
    by_tensor = np.split(torch.cat(sums).cpu().numpy(), np.cumsum([len(blocks) for blocks in sums])[:-1])
    return [MULTILINEAR + finished(blocks, size) for blocks, size in zip(by_tensor, sizes, strict=True)]


@torch.no_grad()
def _sums(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(blocks, 2)"""
    keys, flat = _keys(tensor.device), tensor.contiguous().view(-1)
    bands = flat.split(BAND * BLOCK_BYTES // dtype.itemsize) if len(flat) else ()
    sums = [torch.stack(block_sums(_words(band.to(dtype)), keys), dim=1) for band in bands]
    return torch.cat([torch.empty((0, 2), dtype=torch.int64, device=tensor.device), *sums])


def _words(band: Tensor) -> Tensor:
    """(blocks, WORDS) int64: the bytes of `band`, filled up with zeros."""
    data = band.view(torch.uint8)
    if missing := -len(data) % BLOCK_BYTES:
        data = torch.nn.functional.pad(data, (0, missing))
    elif data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64).view(-1, WORDS)


@lru_cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(KEYS.view(np.int64)).to(device)
