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
from numpy.typing import NDArray

from millrace.core.completion.token_masks import AllowedTokens
from millrace.core.errors import DataError
from millrace.core.types import TrainSequence


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
