"""Token masks on a device, where they cut logits off. Shape suffixes: N = tokens of a row, K = allowed tokens
of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from millrace.devices.gpu import on
from millrace.trainer.recorded.recorded_token_masks import TokenMasks

CUT = -1e30
"""The logit of a token that could not be sampled. Finite: a rank may hold no allowed token."""


@dataclass(frozen=True, slots=True)
class DeviceTokenMasks:
    """`rows_K` and `tokens_K`: the logits that stay. The entries of token n start at `begins[n]`."""

    begins: list[int]
    rows_K: torch.Tensor
    tokens_K: torch.Tensor
    cut_N: torch.Tensor

    def cut(self, logits: torch.Tensor, start: int) -> None:
        """Mask the logits of tokens [start, start + len(logits)), in place, where they are not allowed."""
        entries = slice(self.begins[start], self.begins[start + len(logits)])
        outside = self.cut_N[start : start + len(logits), None].repeat(1, logits.shape[1])
        outside[self.rows_K[entries] - start, self.tokens_K[entries]] = False
        logits.masked_fill_(outside, CUT)


def masks_on(device: torch.device, masks: TokenMasks, first: int, vocabulary: int) -> DeviceTokenMasks:
    """The masks on a device that holds `vocabulary` tokens from `first` on."""
    tokens = masks.tokens_K - first
    inside = (tokens >= 0) & (tokens < vocabulary)
    rows = np.repeat(np.arange(len(masks.counts_N)), masks.counts_N)[inside]
    begins = np.searchsorted(rows, np.arange(len(masks.counts_N) + 1))
    return DeviceTokenMasks(
        begins.tolist(),
        on(device, rows),
        on(device, tokens[inside].astype(np.int64)),
        on(device, masks.counts_N > 0),
    )
