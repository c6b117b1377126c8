"""How work is handed to a GPU: without waiting, beside other work, as one launch. A CPU has none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def has_own_memory(device: torch.device) -> bool:
    """Whether what is there is not in this process's memory: it is copied to and fro, and digested there."""
    return device.type != "cpu"


def has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention computes such heads in `dtype` there: on GPUs from Ampere on."""
    fits = head_dim % 8 == 0 and head_dim <= 256 and dtype.itemsize == 2
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def on(device: torch.device, array: Any) -> torch.Tensor:
    """A numpy array there. Nobody waits for the copy: it is made of pinned memory, when its turn comes."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def mark(device: torch.device) -> Any:
    """The end of all that this thread has handed to `device` so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def side_stream(device: torch.device, after: Any = None) -> Iterator[None]:
    """What is copied inside does not stand in line with what is computed outside, but `after` a mark. At the
    end it is done."""
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
    """Memory that recordings share which never run at the same time. None: nothing is recorded there."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def recorded(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """`step` as one launch, a CUDA graph; without a `pool` the step itself. It runs once before, for what is
    made once. Another thread may bring weights meanwhile, so only this one's calls are watched."""
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
