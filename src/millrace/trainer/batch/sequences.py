"""Sums over the sequences of a row, the same however a batch is packed and divided.

A row holds complete sequences. Only ranks of one sequence group (`trainer.sequence`) share a row, so only
these ranks add their sums. Sums are taken in a fixed order: a repeat gives the same bits.

Shape suffixes: N = trained tokens of this rank's share of a row, S = sequences of the batch.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from millrace.devices.gpu import on


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
        self._ids_N, self._lengths_S, self._device, self._group = ids_N, lengths_S, device, group

    def total(self, x_N: torch.Tensor) -> torch.Tensor:
        ids, order, counts, _ = self._on_device
        sums_S = torch.segment_reduce(x_N.detach()[order], "sum", lengths=counts, initial=0, unsafe=True)
        if self._group is not None:
            from torch import distributed

            distributed.all_reduce(sums_S, group=self._group)
        return sums_S[ids]

    def mean(self, x_N: torch.Tensor) -> torch.Tensor:
        return self.total(x_N) / self._on_device[3]

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, ...]:
        """On the device, at first use: the sequence of each token, the tokens in order of sequences, the
        tokens of each sequence on this rank, and for each token all tokens of its sequence."""
        ids = self._ids_N
        arrays = (
            ids,
            np.argsort(ids, kind="stable"),
            np.bincount(ids, minlength=len(self._lengths_S)),
            self._lengths_S[ids],
        )
        return tuple(on(self._device, array) for array in arrays)
