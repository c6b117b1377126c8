"""What the host asks of a GPU while tensors are computed, seen on a CPU.

A device that computes nothing (torch's `meta`) has no number to give, and raises where one is read. Other
operations make the host wait for a GPU and raise nothing on `meta`. `DeviceWatch` has a list of these.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")

READS_A_NUMBER = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
READS_A_SIZE = {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"_to_copy", "copy_"}
LAUNCH_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
ONE_ON_A_GPU = {torch.nn.functional.rms_norm, torch.nn.functional.scaled_dot_product_attention}
"""Functions that are many operations on `meta`."""


class DeviceWatch(TorchDispatchMode):
    """Inside, each operation is noted.

    waits     those that make the host wait for a GPU, in words
    launches  those that a GPU computes: name, sizes and numbers, and the address of a tensor from before
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launches: list[tuple[Any, ...]] = []
        self.one_function = False
        self._results = set[int]()
        self._functions = _Functions(self)

    @property
    def counts(self) -> Counter[str]:
        return Counter(launch[0] for launch in self.launches)

    def __enter__(self) -> Any:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if reason := _wait(name, args, kwargs):
            self.waits.append(f"{name}: {reason}")
        launches = not (self.one_function or func.is_view or name in LAUNCH_NOTHING)
        if launches:
            self.note(name, args, kwargs)
        out = func(*args, **kwargs)
        if not func.is_view:
            self._results |= {_address(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out

    def note(self, name: str, args: Any, kwargs: Any) -> None:
        self.launches.append((name, *(self._described(x) for x in tree_leaves((args, kwargs)))))

    def _described(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return str(x)
        address = _address(x)
        return (*x.shape, "a result" if address in self._results else address)


def _address(x: torch.Tensor) -> int:
    return 0 if x.is_meta else x.untyped_storage().data_ptr()


def _wait(name: str, args: Any, kwargs: Any) -> str:
    if name in READS_A_NUMBER:
        return "a number is read"
    if name in READS_A_SIZE or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        return "the size of the result is read"
    if name in INDEXES and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        return "a mask is an index"
    if name == "segment_reduce" and not kwargs.get("unsafe"):
        return "the lengths are read"
    if name in COPIES and not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
        devices = {x.device.type for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
        return "a copy between host and device" if len(devices) > 1 else ""
    return ""


class _Functions(TorchFunctionMode):
    def __init__(self, watch: DeviceWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self._watch
        elsewhere = torch.device(kwargs.get("device") or "cpu").type != "cpu"
        if func in (torch.tensor, torch.as_tensor) and elsewhere:
            watch.waits.append("tensor: Python's numbers are copied to the device")
        if func not in ONE_ON_A_GPU or watch.one_function:
            return func(*args, **kwargs)
        watch.note(func.__name__, args, kwargs)
        watch.one_function = True
        try:
            return func(*args, **kwargs)
        finally:
            watch.one_function = False


class HostReads(TorchFunctionMode):
    """Inside, each method of a tensor that gives numbers to Python is counted."""

    METHODS = ("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self._names = {getattr(torch.Tensor, name): name for name in self.METHODS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._names:
            self.reads.append(self._names[func])
        return func(*args, **(kwargs or {}))


def watched(compute: Callable[[], Any]) -> DeviceWatch:
    with DeviceWatch() as watch:
        compute()
    return watch


@contextlib.contextmanager
def meta_as_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Code for a GPU runs on `meta`: host memory is not registered, and nothing is cast."""
    autocast: Any = torch.autocast
    enabled: Any = torch.is_autocast_enabled

    def cast(device: str, **options: Any) -> Any:
        return contextlib.nullcontext() if device == META.type else autocast(device, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch, "autocast", cast)
        patch.setattr(
            torch, "is_autocast_enabled", lambda device="cpu": device != META.type and enabled(device)
        )
        yield patch
