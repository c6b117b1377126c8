"""Sums over the sequences of a row, the same however a batch is packed and divided.

A row holds whole sequences. Only ranks of one sequence group (`trainer.sequence`) share a row, so they alone
add their parts. Sums are taken in a fixed order: a repeat gives the same bits.

Shape suffixes: N = trained tokens of this rank's part of a row, S = sequences of the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from millrace.placement.gpu import on


class RowSequences:
    """`algorithms.logprobs.Sequences` of a row.

    `ids_N`: the sequence of each token in the batch; `lengths_S`: trained tokens of each sequence.
    """

    def __init__(
        self,
        ids_N: NDArray[np.int64],
        lengths_S: NDArray[np.int64],
        device: torch.device,
        group: ProcessGroup | None,
    ) -> None:
        self._ids = on(device, ids_N)
        self._order = on(device, np.argsort(ids_N, kind="stable"))
        self._counts = on(device, np.bincount(ids_N, minlength=len(lengths_S)))
        self._lengths = on(device, lengths_S[ids_N])
        self._group = group

    def total(self, x_N: torch.Tensor) -> torch.Tensor:
        x_N = x_N.detach()
        sums_S = torch.segment_reduce(x_N[self._order], "sum", lengths=self._counts, initial=0)
        if self._group is not None:
            from torch import distributed

            distributed.all_reduce(sums_S, group=self._group)
        return sums_S[self._ids]

    def mean(self, x_N: torch.Tensor) -> torch.Tensor:
        return self.total(x_N) / self._lengths
