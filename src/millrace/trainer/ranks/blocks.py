"""The blocks of the weights that this process owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import distributed

from millrace.core import progress
from millrace.core.errors import WeightsError


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
