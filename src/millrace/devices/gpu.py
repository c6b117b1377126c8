"""Work for a GPU: copies without waiting, a side stream, and steps recorded as one launch. On a CPU these do
nothing special."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
