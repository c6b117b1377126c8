"""A trainer whose weights are on the host (`trainer.offload`): loading them, and threads that update them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from millrace.trainer.ranks.mesh import Ranks

WRAPS = "_dtensor_from_local_like"  # of transformers
UPDATE_THREADS_MAX = 16


@contextmanager
def blocks_on_host() -> Iterator[None]:
    """A model that is loaded in the block keeps each weight where its file is read. transformers moves a
    rank's blocks to the device of the mesh, which has no room for all of them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
    from transformers import core_model_loading, modeling_utils

    def wrapped(block: torch.Tensor, like: Any) -> Any:
        return _from_local_no_grad(block.contiguous(), like._spec)

    with ExitStack() as stack:
        for module in (core_model_loading, modeling_utils):
            if hasattr(module, WRAPS):
                stack.enter_context(mock.patch.object(module, WRAPS, wrapped))
        yield


def computing_device(model: Any) -> torch.device:
    """The device that `model` was loaded for. Weights on the host are on another one."""
    device: torch.device = getattr(model, "computes_on", model.device)
    return device


def update_threads(ranks: Ranks, device: torch.device) -> int:
    """How many threads of this rank update weights: its share of the host's cores, while its GPU waits. 0: as
    many as compute."""
    if not ranks.offload or device.type == "cpu":
        return 0
    return max(1, min(UPDATE_THREADS_MAX, len(os.sched_getaffinity(0)) * ranks.hosts // ranks.world))
