"""What the host asks of a GPU while tensors are computed, seen on a CPU.

A device that computes nothing (torch's `meta`) has no number to give, and raises where one is read. Other
operations make the host wait for a GPU and raise nothing on `meta`. `DeviceWatch` has a list of these.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace.trainer.kernels import fused_attention, on_gpu, products

META = torch.device("meta")

READS_A_NUMBER = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
READS_A_SIZE = {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"_to_copy", "copy_"}
LAUNCH_NOTHING = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"),
    *("_unsafe_view", "split_with_sizes"),
}
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

    @contextlib.contextmanager
    def as_one(self, name: str) -> Iterator[None]:
        """What is launched inside is noted as one launch."""
        if self.one_function:
            yield
            return
        self.note(name, (), {})
        self.one_function = True
        try:
            yield
        finally:
            self.one_function = False

    @property
    def counts(self) -> Counter[str]:
        return Counter(launch[0] for launch in self.launches)

    def __enter__(self) -> Any:
        self.waits.clear()
        self.launches.clear()
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
        with watch.as_one(func.__name__):
            return func(*args, **kwargs)


KERNELS = {"_heads": 3}
"""Functions that torch 2.13 compiles for a GPU to several kernels, forward and backward."""


class _Compiled(torch.autograd.Function):
    """What torch compiles is one launch each way, or `KERNELS`, and two more for the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], watch: DeviceWatch, args: Any, *tensors: Any) -> Any:
        ctx.given = function, watch, args
        name = f"{function.__name__}, compiled"
        watch.launches += [(name,)] * (KERNELS.get(function.__name__, 1) - 1)
        with watch.as_one(name):
            return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        function, watch, args = ctx.given
        needed = ctx.needs_input_grad[3:]
        copies = {id(x): x.detach().requires_grad_(x.is_floating_point()) for x in _tensors(args)}
        name = f"{function.__name__}, compiled, backward"
        watch.launches += [(name,)] * (KERNELS.get(function.__name__, 1) - 1)
        with watch.as_one(name), torch.enable_grad():
            found = function(*(copies.get(id(x), x) for x in args))
            inputs = [*copies.values(), *_weights(args)]
            asked = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
            slopes = iter(torch.autograd.grad(found, asked, grads))
        watch.launches += [("gradient of a norm's weight",)] * (2 * sum(needed[len(copies) :]))
        return None, None, None, *(next(slopes) if is_needed else None for is_needed in needed)


def _tensors(args: Any) -> list[torch.Tensor]:
    return list({id(x): x for x in args if isinstance(x, torch.Tensor)}.values())


def _weights(args: Any) -> list[torch.nn.Parameter]:
    return [p for x in args if isinstance(x, torch.nn.Module) for p in x.parameters()]


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
def trained_as_on_gpu(model: Any) -> Iterator[DeviceWatch]:
    """Inside, a model on `meta` computes as in bfloat16 on a GPU. The watch has to be entered."""
    with meta_as_gpu() as patch:
        watch = DeviceWatch()

        def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
            return lambda *args: _Compiled.apply(function, watch, args, *_tensors(args), *_weights(args))

        for family in {type(module).__module__ for module in model.modules()}:
            if hasattr(sys.modules[family], on_gpu.ROTATE):  # undone afterwards
                patch.setattr(sys.modules[family], on_gpu.ROTATE, getattr(sys.modules[family], on_gpu.ROTATE))
        patch.setattr(on_gpu, "compiled", compiled)
        patch.setattr(on_gpu, "matmul_dtype", lambda x: torch.bfloat16)
        patch.setattr(on_gpu, "has_grouped", lambda device, dtype, shapes: True)
        patch.setattr(fused_attention, "has_flash", lambda device, dtype, head_dim: dtype.itemsize == 2)
        optimizers = sys.modules[torch.optim.Optimizer.__module__]
        for module, kind in ((optimizers, "fused"), (_foreach_utils, "foreach")):
            patch.setattr(module, f"_get_{kind}_kernels_supported_devices", lambda: [META.type])
        products.install_linear(model)
        on_gpu.install_experts(model)
        on_gpu.install_compiled(model)
        yield watch


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
