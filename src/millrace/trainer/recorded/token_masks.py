"""For each trained token, the tokens that could be sampled in its place. Policies are compared on them alone.

Sampling with top-p, top-k or min-p cuts tokens off. So every policy is renormalised over the remaining
tokens: DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask".

Shape suffixes: C = completion tokens of the batch, N = tokens of a row, K = allowed tokens of all of them.
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
"""The logit of a token that could not be sampled. Finite: a rank may hold no allowed token."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """For each of N tokens, how many tokens are allowed (0: the whole vocabulary), and their ids."""

    counts_N: NDArray[np.int64]
    tokens_K: NDArray[np.int32]

    def of(self, tokens: NDArray[np.integer[Any]]) -> TokenMasks:
        """The masks of some of the tokens, in the order of `tokens`."""
        counts = self.counts_N[tokens]
        begins = (np.cumsum(self.counts_N) - self.counts_N)[tokens]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return TokenMasks(counts, self.tokens_K[np.repeat(begins, counts) + within])

    def there(self, device: torch.device, first: int, vocabulary: int) -> DeviceTokenMasks:
        """The masks on a device that holds `vocabulary` tokens from `first` on."""
        tokens = self.tokens_K - first
        inside = (tokens >= 0) & (tokens < vocabulary)
        rows = np.repeat(np.arange(len(self.counts_N)), self.counts_N)[inside]
        begins = np.searchsorted(rows, np.arange(len(self.counts_N) + 1))
        return DeviceTokenMasks(
            begins.tolist(),
            on(device, rows),
            on(device, tokens[inside].astype(np.int64)),
            on(device, self.counts_N > 0),
        )


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


def token_masks_of(sequences: Sequence[TrainSequence]) -> TokenMasks | None:
    """The masks of every completion token of the sequences; None: no sequence has masks.

    Raises: DataError: a sampled token is not among its allowed tokens.
    """
    if all(sequence.columns.token_masks is None for sequence in sequences):
        return None
    allowed = [s.columns.token_masks or AllowedTokens.unlimited(len(s.columns)) for s in sequences]
    counts_C = np.concatenate([np.asarray(mask.counts, dtype=np.int64) for mask in allowed])
    tokens_K = np.concatenate([np.asarray(mask.tokens) for mask in allowed])
    _refuse_not_allowed(sequences, counts_C, tokens_K)
    return TokenMasks(counts_C, tokens_K)


def _refuse_not_allowed(
    sequences: Sequence[TrainSequence], counts_C: NDArray[np.int64], tokens_K: NDArray[np.int32]
) -> None:
    sampled_C = np.concatenate([np.asarray(s.columns.tokens) for s in sequences])
    index_K = np.repeat(np.arange(len(counts_C)), counts_C)
    among_C = np.zeros(len(counts_C), dtype=bool)
    among_C[index_K[tokens_K == sampled_C[index_K]]] = True
    wrong = np.flatnonzero((counts_C > 0) & ~among_C)
    if wrong.size:
        ends = np.cumsum([len(s.columns) for s in sequences])
        sequence = sequences[int(np.searchsorted(ends, wrong[0], side="right"))]
        raise DataError(
            f"trajectory {sequence.trajectory_id} has the token {sampled_C[wrong[0]]}, which is none of "
            f"the {counts_C[wrong[0]]} tokens that were allowed there. "
            "The engine must record the tokens that it sampled from"
        )
