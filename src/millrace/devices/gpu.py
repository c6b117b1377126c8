"""Work for a GPU: copies without waiting, a side stream, steps recorded as one launch, and digests of
tensors, computed on the device that holds them (see `core.multilinear`). On a CPU the first three do
nothing special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from millrace.core.digest import MULTILINEAR
from millrace.core.multilinear import BLOCK_BYTES, KEYS, WORDS, block_sums, finished

Tensor = torch.Tensor


def has_own_memory(device: torch.device) -> bool:
    """Whether the device has memory of its own. Then tensors are copied to and fro, and digested there."""
    return device.type != "cpu"


def has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention computes such heads in `dtype` on `device`: on GPUs from Ampere on."""
    fits = head_dim % 8 == 0 and head_dim <= 256 and dtype.itemsize == 2
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def on(device: torch.device, array: Any) -> torch.Tensor:
    """A numpy array on `device`. The host does not wait for the copy, which is made from pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def mark(device: torch.device) -> Any:
    """An event at the end of all work that this thread has given to `device` so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_mark(device: torch.device, after: Any) -> None:
    """Later work of this thread on `device` begins `after` a mark. The host does not wait."""
    if after is not None:
        torch.cuda.current_stream(device).wait_event(after)


@contextmanager
def side_stream(device: torch.device, after: Any = None) -> Iterator[None]:
    """Copies inside the block run beside computation outside it, on a stream of their own, `after` a mark.
    The block ends when they are done."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def recording_pool(device: torch.device) -> Any:
    """Memory that recordings share, which never run at the same time. None: `device` records nothing."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def recorded(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """`step` as one launch, a CUDA graph; without a `pool` the step itself. The step runs once before the
    recording, to make what it makes only once. Another thread may pull weights meanwhile, so the recording
    watches only this thread's calls."""
    if pool is None:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay


# ---------------------------------------------------------------- digests


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
