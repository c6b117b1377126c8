"""Matmuls of rows that are sorted by group, each group with a matrix of its own, in one call on GPUs.

No group is a call of its own, and the host does not read how large a group is.

Shape suffixes: M rows, G groups, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F


def has_grouped(device: torch.device, dtype: torch.dtype, shapes: Iterable[Iterable[int]]) -> bool:
    """Whether torch has a kernel there for matrices of such shapes, (G, O, I): in bfloat16 on Hopper and
    Blackwell, where rows begin at multiples of 16 bytes. Elsewhere torch reads sizes on the host."""
    aligned = all(size % 8 == 0 for shape in shapes for size in tuple(shape)[1:])
    fits = aligned and dtype == torch.bfloat16 and device.type == "cuda"
    return fits and torch.cuda.get_device_capability(device)[0] in (9, 10)


def group_ends(groups_M: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(G,) int32: where the rows of each group end. `groups_M` is sorted."""
    each = torch.arange(num_groups, dtype=groups_M.dtype, device=groups_M.device)
    return torch.searchsorted(groups_M, each, right=True, out_int32=True)


def grouped_linear(x_MI: torch.Tensor, weight_GOI: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """(M, O): of each row its product with the transposed matrix of its group. With a gradient."""
    return F.grouped_mm(x_MI, weight_GOI.transpose(-2, -1), offs=ends_G)
