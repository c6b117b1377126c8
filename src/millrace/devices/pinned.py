"""Pinned memory: memory of other processes, registered with a GPU, which then copies it directly.

Registering fails if the kernel or a container limits locked memory. Then copies go through the driver's own
memory: slower, and right.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.core.digest import NamedBuffer
from millrace.devices.gpu import side_stream

Bytes = NDArray[np.uint8]

PAGE = mmap.PAGESIZE
READ_ONLY = 0x08  # cudaHostRegisterReadOnly: the mapping cannot be written


def pinned(memory: Bytes) -> Callable[[], None]:
    """Register `memory`, which begins and ends at a page, with the GPU of this process. Returns a function
    that unregisters the memory. A failure is one warning, and its function does nothing."""
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    flags = 0 if memory.flags.writeable else READ_ONLY
    code = int(runtime.cudaHostRegister(address, memory.nbytes, flags))
    if code == 0:
        return lambda: _unpinned(address)
    _forget_error()
    warnings.warn(
        f"memory of published weights cannot be registered with the GPU (CUDA error {code}): "
        "copying them is slower. Raise the limit of locked memory: `ulimit -l`, or `--ulimit memlock=-1` of "
        "a container; 801 says that this GPU registers no memory that is only read",
        stacklevel=2,
    )
    return lambda: None


def page_areas(places: Iterable[Bytes]) -> list[Bytes]:
    """The pages of all contiguous `places`, in as few areas as possible: no page is in two areas. The host
    fills other places."""
    spans = sorted(
        (_page(place, 0), _page(place, place.nbytes - 1) + 1) for place in places if _joined(place)
    )
    merged = list[tuple[int, int]]()
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    return [_pages(begin, end) for begin, end in merged]


def _pages(begin: int, end: int) -> Bytes:
    num_bytes = (end - begin) * PAGE
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(begin * PAGE))


def _joined(place: Bytes) -> bool:
    return bool(place.nbytes) and place.flags.c_contiguous


def _page(place: Bytes, offset: int) -> int:
    return (place.ctypes.data + offset) // PAGE


def copy_to_device(
    device: torch.device, after: Any, sources: Sequence[NamedBuffer], into: Sequence[NamedBuffer]
) -> None:
    """Copy host bytes into buffers of `device`, beside its computation, `after` that mark. Every copy is done
    at the end."""
    with side_stream(device, after):
        for source, target in zip(sources, into, strict=True):
            target.data.copy_(as_tensor(source.data), non_blocking=True)


def copy_from_device(device: torch.device, tensors: Iterable[torch.Tensor], places: Sequence[Bytes]) -> None:
    """Copy the bytes of tensors of `device` to places in host memory. Every copy is done at the end.

    The host fills a place that is not contiguous (columns), from a copy of the tensor.
    """
    for tensor, place in zip(tensors, places, strict=True):
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if place.flags.c_contiguous:
            as_tensor(place).view(-1).copy_(source, non_blocking=True)
        else:
            torch.from_numpy(place).copy_(source.view(place.shape))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def as_tensor(memory: Bytes) -> torch.Tensor:
    """A tensor in the same bytes, valid as long as `memory`. torch has no read-only tensors, and would warn
    of read-only memory."""
    if not memory.size:
        return torch.empty(memory.shape, dtype=torch.uint8)
    assert memory.flags.c_contiguous, memory.strides
    view = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    return torch.frombuffer(view, dtype=torch.uint8)


def _unpinned(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error()


def _forget_error() -> None:
    """Take the last error of CUDA's runtime. Otherwise the next kernel would get the error."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
