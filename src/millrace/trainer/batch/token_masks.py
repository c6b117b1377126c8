"""Of each token that is trained, those that could have come there: policies are compared on these alone.

Where sampling cuts tokens off (top-p, top-k, min-p), the policy that sampled knows only the others. So every
policy is renormalised over them: DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask".

Shape suffixes: C = completion tokens of the batch, N = tokens of a row, K = choices of all these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.core.completion.token_masks import AllowedTokens
from millrace.core.errors import DataError
from millrace.core.types import TrainSequence
from millrace.devices.gpu import on

CUT = -1e30
"""The logit of a token that could not come. Finite: a rank may hold none that could."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Of N tokens: of each how many could come (0: all of the vocabulary), and which."""

    counts_N: NDArray[np.int64]
    tokens_K: NDArray[np.int32]

    def of(self, tokens: NDArray[np.integer[Any]]) -> TokenMasks:
        """Those of some of the tokens, in their order."""
        counts = self.counts_N[tokens]
        begins = (np.cumsum(self.counts_N) - self.counts_N)[tokens]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return TokenMasks(counts, self.tokens_K[np.repeat(begins, counts) + within])

    def there(self, device: torch.device, first: int, vocabulary: int) -> DeviceTokenMasks:
        """On a device that holds `vocabulary` tokens from `first` on."""
        tokens = self.tokens_K - first
        held = (tokens >= 0) & (tokens < vocabulary)
        rows = np.repeat(np.arange(len(self.counts_N)), self.counts_N)[held]
        begins = np.searchsorted(rows, np.arange(len(self.counts_N) + 1))
        return DeviceTokenMasks(
            begins.tolist(),
            on(device, rows),
            on(device, tokens[held].astype(np.int64)),
            on(device, self.counts_N > 0),
        )


@dataclass(frozen=True, slots=True)
class DeviceTokenMasks:
    """`rows_K` and `tokens_K` say where a logit may stay; those of token n are from `begins[n]` on."""

    begins: list[int]
    rows_K: torch.Tensor
    tokens_K: torch.Tensor
    cut_N: torch.Tensor

    def cut(self, logits: torch.Tensor, start: int) -> None:
        """Take out of the logits of tokens [start, start + len(logits)), in place, what could not come."""
        part = slice(self.begins[start], self.begins[start + len(logits)])
        outside = self.cut_N[start : start + len(logits), None].repeat(1, logits.shape[1])
        outside[self.rows_K[part] - start, self.tokens_K[part]] = False
        logits.masked_fill_(outside, CUT)


def token_masks_of(sequences: Sequence[TrainSequence]) -> TokenMasks | None:
    """Of every completion token of the sequences; None: no sequence has any.

    Raises: DataError: a sampled token is none of those that could come.
    """
    if all(sequence.columns.token_masks is None for sequence in sequences):
        return None
    every = [s.columns.token_masks or AllowedTokens.unlimited(len(s.columns)) for s in sequences]
    counts_C = np.concatenate([np.asarray(one.counts, dtype=np.int64) for one in every])
    tokens_K = np.concatenate([np.asarray(one.tokens) for one in every])
    _refuse_strangers(sequences, counts_C, tokens_K)
    return TokenMasks(counts_C, tokens_K)


def _refuse_strangers(
    sequences: Sequence[TrainSequence], counts_C: NDArray[np.int64], tokens_K: NDArray[np.int32]
) -> None:
    sampled_C = np.concatenate([np.asarray(s.columns.tokens) for s in sequences])
    index_K = np.repeat(np.arange(len(counts_C)), counts_C)
    among_C = np.zeros(len(counts_C), dtype=bool)
    among_C[index_K[tokens_K == sampled_C[index_K]]] = True
    strange = np.flatnonzero((counts_C > 0) & ~among_C)
    if strange.size:
        ends = np.cumsum([len(s.columns) for s in sequences])
        sequence = sequences[int(np.searchsorted(ends, strange[0], side="right"))]
        raise DataError(
            f"trajectory {sequence.trajectory_id} has the token {sampled_C[strange[0]]}, which is none of "
            f"the {counts_C[strange[0]]} tokens that could come there. "
            "The engine must record those that it drew from"
        )
