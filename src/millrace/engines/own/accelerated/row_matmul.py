"""Matmuls of rows with a weight matrix, and the padding of the rows.

Matrix kernels work on tiles of rows. Other code, which rounds differently, computes rows that do not fill a
tile. So a row's result may depend, in its last bits, on the number of rows. `exact` finds the padding that
avoids this; without `exact` nothing is padded, which is fastest.

Where a CPU multiplies in bfloat16, the weights are bfloat16 and rows are float32. A product rounds its rows,
sums in float32, and rounds its result; logits are not rounded.

Shape suffixes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from millrace.devices.matmul import (
    ROWS_MIN,
    WIDE,
    by_onednn,
    matmul_packed,
    matmul_transposed,
    matmul_wide,
    packed,
    packing_pays,
    packs,
)

Tensor = torch.Tensor
PACKED_ROWS_MIN = 8
"""From so many rows on oneDNN is faster with a packed matrix. Its bits are those of its plain matmul."""


@dataclass(frozen=True)
class RowMatmul:
    """Rows are padded to a multiple of `tile`. `alone`: each row is a matmul of its own. `packed`: copies of
    wide matrices by address and type, made at their first use. Who changes a matrix calls `forget`."""

    tile: int = 1
    alone: bool = False
    packed: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict, compare=False)

    def rows(self, count: int) -> int:
        """`count`, padded. Beyond eight tiles the number grows in steps of an eighth to a quarter, so that
        few numbers of rows occur."""
        if self.tile == 1:
            return count
        tiles = -(-count // self.tile)
        step = 1 << max(0, (tiles - 1).bit_length() - 3)
        return -(-tiles // step) * step * self.tile

    def by_onednn(self, x_MI: Tensor, weight_OI: Tensor) -> bool:
        """Where rows need not be independent, the faster kernel may compute them."""
        if self.tile > 1:
            return False
        if _is_wide(x_MI):
            return len(x_MI) >= PACKED_ROWS_MIN and packing_pays(weight_OI)
        return len(x_MI) >= ROWS_MIN and by_onednn()

    def in_place(self, x_MI: Tensor, weight_OI: Tensor) -> bool:
        """Whether torch may write the product into memory that exists."""
        return not (self.alone or x_MI.dtype != weight_OI.dtype or self.by_onednn(x_MI, weight_OI))

    def forget(self) -> None:
        """The weights have changed: copies of them are dropped."""
        self.packed.clear()

    def linear(self, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """(M, O): x weight^T + bias"""
        if x_MI.dtype != weight_OI.dtype:
            out = self._packed(x_MI.to(weight_OI.dtype), weight_OI).to(x_MI.dtype)
            return out if bias_O is None else out.add_(bias_O)
        if self.by_onednn(x_MI, weight_OI):
            out = self._packed(x_MI, weight_OI) if _is_wide(x_MI) else matmul_transposed(x_MI, weight_OI)
            return out if bias_O is None else out.add_(bias_O)
        if not self.alone:
            return F.linear(x_MI, weight_OI, bias_O)
        out = torch.bmm(x_MI[:, None], weight_OI.t().expand(len(x_MI), -1, -1))[:, 0]
        return out if bias_O is None else out.add_(bias_O)

    def add_linear(self, to_MO: Tensor, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """to += x weight^T + bias"""
        if not self.in_place(x_MI, weight_OI):
            to_MO += self.linear(x_MI, weight_OI, bias_O)
            return
        to_MO.addmm_(x_MI, weight_OI.t())
        if bias_O is not None:
            to_MO += bias_O

    def logits(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """(M, O) in float32. A GPU does not round them to the type of its factors."""
        if x_MI.is_cuda:
            return matmul_wide(x_MI, weight_OI.t())
        if x_MI.dtype != weight_OI.dtype:
            return self._packed(x_MI.to(weight_OI.dtype).to(x_MI.dtype), weight_OI)
        return self.linear(x_MI, weight_OI, None).float()

    def _packed(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """x weight^T in the type of `x_MI`."""
        if not packs(x_MI.dtype):
            return F.linear(x_MI, weight_OI.to(x_MI.dtype))
        key = weight_OI.data_ptr(), x_MI.dtype
        if key not in self.packed:
            self.packed[key] = packed(weight_OI.to(x_MI.dtype))
        return matmul_packed(x_MI, self.packed[key])

    def __str__(self) -> str:
        return "each row alone" if self.alone else f"rows padded to {self.tile}" if self.tile > 1 else "rows"


def _is_wide(x_MI: Tensor) -> bool:
    return x_MI.device.type == "cpu" and x_MI.dtype == torch.float32 and x_MI.shape[1] >= WIDE
