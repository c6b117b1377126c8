"""The blocks of the weights that this process owns, and blocks that are on the host (`trainer.offload`):
loading them, and threads that update them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch
from torch import distributed

from millrace.core import progress
from millrace.core.errors import WeightsError
from millrace.trainer.ranks.mesh import Ranks


@dataclass(frozen=True, slots=True)
class OwnedBlock:
    """A block of a weight that this process owns: no other process writes this block."""

    name: str  # in the Hugging Face state dict
    shape: tuple[int, ...]  # of the whole weight
    start: tuple[int, ...]  # where the block begins in it
    block: torch.Tensor  # a plain tensor: the local values


def owned_blocks(weights: Mapping[str, torch.Tensor], *, copies: bool = False) -> list[OwnedBlock]:
    """The blocks of `weights` that this process owns. All processes' blocks together are the weights.

    A plain tensor is whole on every rank: the first rank owns it. Of a DTensor a rank has a block, or several
    blocks if its rows or columns are not adjacent. If ranks have equal blocks, the first along the mesh owns
    the block. Nothing is copied, and no process waits for another. `copies`: also blocks of which this rank
    has a copy, and which another rank owns.
    """
    blocks = []
    for name, weight in weights.items():
        if hasattr(weight, "placements"):
            blocks += _local_blocks(name, weight, copies)
        elif copies or _first_rank():
            blocks.append(OwnedBlock(name, tuple(weight.shape), (0,) * weight.ndim, weight.detach()))
    return [owned for owned in blocks if owned.block.numel()]


def _first_rank() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _local_blocks(name: str, weight: Any, copies: bool) -> list[OwnedBlock]:
    """One block for each combination of runs of adjacent indices, along every dimension.

    Raises: WeightsError: the rank's values are a summand of the weight, or their shape is not as placed.
    """
    shape, mesh = tuple(weight.shape), weight.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not (copies or 0 in mesh.mesh):
        return []  # this rank is not in the mesh, or another of several equal meshes owns the weight
    indices = [torch.arange(size) for size in shape]  # of this rank, per dimension
    for place, index, count in zip(weight.placements, coordinate, mesh.shape, strict=True):
        if place.is_partial():
            raise WeightsError(f"`{name}` is placed as {place}: a sum over ranks cannot be taken apart")
        if place.is_replicate():
            if index and not copies:
                return []
            continue
        line = indices[place.dim].view([-1 if dim == place.dim else 1 for dim in range(len(shape))])
        chunks, _ = place._split_tensor(line, count, with_padding=False, contiguous=False)
        indices[place.dim] = chunks[index].reshape(-1)
    local = weight.detach().to_local()
    if tuple(local.shape) != tuple(map(len, indices)) and local.numel():
        raise WeightsError(f"`{name}` is placed as {weight.placements}, yet here it has {tuple(local.shape)}")
    return [
        OwnedBlock(name, shape, tuple(start for start, _ in runs), local[tuple(where for _, where in runs)])
        for runs in product(*map(_runs, indices))
    ]


def _runs(indices: torch.Tensor) -> list[tuple[int, slice]]:
    """The runs of adjacent indices: (the first index, the slice of `indices`)."""
    if not len(indices):
        return []
    cuts = [0, *(torch.nonzero(indices.diff() != 1).flatten() + 1).tolist(), len(indices)]
    return [(int(indices[a]), slice(a, b)) for a, b in pairwise(cuts)]


def copy_into(blocks: Iterable[OwnedBlock], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `blocks` from whole tensors."""
    with torch.no_grad():
        for owned in blocks:
            sizes = zip(owned.start, owned.block.shape, strict=True)
            where = tuple(slice(start, start + size) for start, size in sizes)
            owned.block.copy_(tensors[owned.name][where])
            progress.count()


# ---------------------------------------------------------------- on the host


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
