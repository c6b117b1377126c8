"""Pinned memory: memory of other processes, registered with a GPU, which then copies it directly.

Registering fails if the kernel or a container limits locked memory. Then copies go through the driver's own
memory: slower, and right.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.core.digest import NamedBuffer
from millrace.devices.gpu import mark, side_stream, wait_mark

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
    ends = [(_address(place), place.nbytes) for place in places if _joined(place)]
    spans = sorted((begin // PAGE, (begin + num_bytes - 1) // PAGE + 1) for begin, num_bytes in ends)
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


def _address(place: Bytes) -> int:
    """Faster than `ctypes.data`, and the trainer waits for it."""
    address: int = place.__array_interface__["data"][0]
    return address


def copy_to_device(
    device: torch.device, after: Any, sources: Sequence[NamedBuffer], into: Sequence[NamedBuffer]
) -> None:
    """Copy host bytes into buffers of `device`, beside its computation, `after` that mark. Every copy is done
    at the end."""
    with side_stream(device, after):
        for source, target in zip(sources, into, strict=True):
            target.data.copy_(as_tensor(source.data), non_blocking=True)


STAGED_BYTES = 1 << 26
"""Of one of two buffers on the device. A copy of so many bytes takes a millisecond, a rounding a tenth."""


def copy_from_device(
    device: torch.device, tensors: Sequence[torch.Tensor], places: Sequence[Bytes], dtype: torch.dtype
) -> None:
    """Copy tensors of `device`, rounded to `dtype`, to places in host memory. Every copy is done at the end.

    A stream fills one of two buffers while another stream copies the other buffer. So the bus waits neither
    for a rounding nor for small tensors. The host fills a place that is not contiguous (columns), from a copy
    of the tensor.
    """
    beside = torch.cuda.Stream(device) if device.type == "cuda" else None
    copying = nullcontext if beside is None else partial(torch.cuda.stream, beside)
    runs, copied = joined_runs(places, dtype.itemsize), [None, None]
    room = max((run.num_values for run in runs), default=0)
    buffers = [torch.empty(room, dtype=dtype, device=device) for _ in runs[:2]]
    for number, run in enumerate(runs):
        lane, end = number % 2, 0
        wait_mark(device, copied[lane])
        for index, begin, stop in run.parts:
            begin_here, end = end, end + stop - begin
            buffers[lane][begin_here:end].copy_(tensors[index].detach().reshape(-1)[begin:stop])
        filled = mark(device)
        with copying():
            wait_mark(device, filled)
            source = buffers[lane][:end].view(torch.uint8)
            _at(run.address, len(source)).copy_(source, non_blocking=True)
            copied[lane] = mark(device)
    for tensor, place in zip(tensors, places, strict=True):
        if place.nbytes and not place.flags.c_contiguous:
            source = tensor.detach().to(dtype).contiguous().view(-1).view(torch.uint8)
            torch.from_numpy(place).copy_(source.view(place.shape))
    if beside is not None:
        beside.synchronize()


class JoinedPlaces(NamedTuple):
    """Host memory that one copy fills, and what goes there: (index of a tensor, its values from, to)."""

    address: int
    parts: list[tuple[int, int, int]]

    @property
    def num_values(self) -> int:
        return sum(stop - begin for _, begin, stop in self.parts)


def joined_runs(
    places: Sequence[Bytes], itemsize: int, staged_bytes: int | None = None
) -> list[JoinedPlaces]:
    """The contiguous places, in as few runs of at most `staged_bytes` as possible, in their order."""
    room, runs, end, left = (staged_bytes or STAGED_BYTES) // itemsize, list[JoinedPlaces](), 0, 0
    for index, place in enumerate(places):
        if not _joined(place):
            continue
        address, begin, count = _address(place), 0, place.nbytes // itemsize
        while begin < count:
            if address != end or not left:
                runs.append(JoinedPlaces(address, []))
                left = room
            size = min(count - begin, left)
            runs[-1].parts.append((index, begin, begin + size))
            begin, left, address = begin + size, left - size, address + size * itemsize
            end = address
    return runs


def as_tensor(memory: Bytes) -> torch.Tensor:
    """A tensor in the same bytes, valid as long as `memory`. torch has no read-only tensors, and would warn
    of read-only memory."""
    if not memory.size:
        return torch.empty(memory.shape, dtype=torch.uint8)
    assert memory.flags.c_contiguous, memory.strides
    return _at(_address(memory), memory.nbytes)


def _at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def _unpinned(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error()


def _forget_error() -> None:
    """Take the last error of CUDA's runtime. Otherwise the next kernel would get the error."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
