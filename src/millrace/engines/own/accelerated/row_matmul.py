"""Matmuls of rows with a weight matrix, and the padding of the rows.

Matrix kernels work on tiles of rows. Other code, which rounds differently, computes rows that do not fill a
tile. So a row's result may depend, in its last bits, on the number of rows. `exact` finds the padding that
avoids this; without `exact` nothing is padded, which is fastest.

Shape suffixes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from millrace.devices.matmul import ROWS_MIN, by_onednn, matmul_transposed, matmul_wide

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowMatmul:
    """Rows are padded to a multiple of `tile`. `alone`: each row is a matmul of its own."""

    tile: int = 1
    alone: bool = False

    def rows(self, count: int) -> int:
        """`count`, padded. Beyond eight tiles the number grows in steps of an eighth to a quarter, so that
        few numbers of rows occur."""
        if self.tile == 1:
            return count
        tiles = -(-count // self.tile)
        step = 1 << max(0, (tiles - 1).bit_length() - 3)
        return -(-tiles // step) * step * self.tile

    def by_onednn(self, rows: int) -> bool:
        """Where rows need not be independent, the faster kernel may compute them."""
        return self.tile == 1 and rows >= ROWS_MIN and by_onednn()

    def linear(self, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """(M, O): x weight^T + bias"""
        if self.by_onednn(x_MI.shape[0]):
            out = matmul_transposed(x_MI, weight_OI)
            return out if bias_O is None else out.add_(bias_O)
        if not self.alone:
            return F.linear(x_MI, weight_OI, bias_O)
        out = torch.bmm(x_MI[:, None], weight_OI.t().expand(len(x_MI), -1, -1))[:, 0]
        return out if bias_O is None else out.add_(bias_O)

    def add_linear(self, to_MO: Tensor, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """to += x weight^T + bias"""
        if self.alone or self.by_onednn(x_MI.shape[0]):
            to_MO += self.linear(x_MI, weight_OI, bias_O)
            return
        to_MO.addmm_(x_MI, weight_OI.t())
        if bias_O is not None:
            to_MO += bias_O

    def logits(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """(M, O) in float32. A GPU does not round them to the type of its factors."""
        if x_MI.is_cuda:
            return matmul_wide(x_MI, weight_OI.t())
        return self.linear(x_MI, weight_OI, None).float()

    def __str__(self) -> str:
        return "each row alone" if self.alone else f"rows padded to {self.tile}" if self.tile > 1 else "rows"


FASTEST = RowMatmul()
