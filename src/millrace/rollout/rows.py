"""How many rows a matrix product must have so that no row's result depends on the others.

Matrix kernels work on tiles of rows and compute what does not fill a tile with other code, which
rounds differently. Where products with a multiple of m rows never mix the two, padding to m makes a
trajectory's numbers independent of its neighbours, bit for bit. m depends on the CPU (16 with
AVX-512, 96 with AVX2, as measured), so it is found by trying.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

_CANDIDATES = (16, 96)
_SHAPES = ((16, 48), (64, 128), (72, 222), (128, 384), (256, 1000), (1024, 256))  # (inputs, outputs)


@dataclass(frozen=True)
class RowPadding:
    """Rows are padded to `multiple`; `exact`: then rows were seen to be independent of each other."""

    multiple: int
    exact: bool


@cache
def row_padding(dtype: torch.dtype, device_type: str) -> RowPadding:
    """The padding for products in `dtype`. Other devices than the CPU promise nothing."""
    if device_type == "cpu":
        for multiple in _CANDIDATES:
            if all(_independent(multiple, *shape, dtype) for shape in _SHAPES):
                return RowPadding(multiple, exact=True)
    return RowPadding(_CANDIDATES[0], exact=False)


def _independent(multiple: int, inputs: int, outputs: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6 * multiple, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    whole = F.linear(x, weight)
    for count in range(multiple, len(x), multiple):
        rows = torch.randperm(len(x), generator=generator)[:count]
        if not torch.equal(F.linear(x[rows], weight), whole[rows]):
            return False
    return True
