"""Operators of torch that a kernel in Triton computes on a GPU.

An operator is one launch to whoever counts. On torch's device `meta` it gives shapes only. On a CPU plain
operations compute it, if there are any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

LOG = logging.getLogger(__name__)
OPERATORS: Any = torch.ops.millrace
_LIBRARY = torch.library.Library("millrace", "DEF")


def define(
    schema: str, kernels: str, *, shape: Callable[..., Any], plain: Callable[..., Any] | None = None
) -> None:
    """The operator of this schema. `kernels`: the module with a function of its name, imported at its first
    call, because Triton may be missing."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, partial(_by_kernel, kernels, name), "CUDA")
    _LIBRARY.impl(name, shape, "Meta")
    if plain is not None:
        _LIBRARY.impl(name, plain, "CPU")


def agrees(what: str, gap: Callable[[], float], tolerance: float) -> bool:
    """Whether kernels run, and are less than `tolerance` off. Otherwise the log says why `what` is computed
    without them. `gap`: their distance from plain operations, on an example."""
    try:
        found = gap()
    except Exception as error:  # Triton, its compiler and its driver raise errors of every kind
        LOG.warning("%s without a fused kernel: %s", what, error)
        return False
    if not found < tolerance:
        LOG.warning("%s without a fused kernel: it is off by %g", what, found)
        return False
    LOG.info("%s with a fused kernel", what)
    return True


def _by_kernel(kernels: str, name: str, *arguments: Any) -> Any:
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
        return getattr(import_module(kernels), name)(*arguments)
