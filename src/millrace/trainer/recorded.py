"""What engines recorded with each trained token, as arrays: the tokens that could be sampled in its place,
and the experts that it was sampled with. Policies are compared on these tokens alone, and `replay` trains
with these experts.

Sampling with top-p, top-k or min-p cuts tokens off. So every policy is renormalised over the remaining
tokens: DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask".

Shape suffixes: C = completion tokens of the batch, or of a sequence, N = tokens of a row, K = allowed tokens
of all of them, W = layers with experts x experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.completion.routing import Routing
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


# ---------------------------------------------------------------- experts


OWN = -1
"""In the place of an expert: nothing is recorded for this token, so the trainer's router chooses."""


def routing_of(sequences: Sequence[TrainSequence]) -> list[NDArray[np.int32]] | list[None]:
    """(C, W) of each sequence, `OWN` where nothing is recorded; None for all: nothing is recorded at all.

    Raises: DataError: the records are of different models.
    """
    recorded = [sequence.columns.routing for sequence in sequences]
    widths = {routing.width for routing in recorded if routing is not None}
    if not widths:
        return [None] * len(sequences)
    if len(widths) > 1:
        raise DataError(f"trajectories have {sorted(widths)} recorded experts a token: not of one model")
    [width] = widths
    return [_experts(sequence.columns.routing, len(sequence.columns), width) for sequence in sequences]


def _experts(routing: Routing | None, length: int, width: int) -> NDArray[np.int32]:
    if routing is None:
        return np.full((length, width), OWN, np.int32)
    numbers = np.asarray(routing.experts).astype(np.int32).reshape(length, width)
    nothing = 2 ** (8 * routing.experts.itemsize) - 1
    return np.where(numbers == nothing, OWN, numbers)


def num_equal(a_CW: NDArray[np.int32] | None, b_CW: NDArray[np.int32] | None, most: int) -> int:
    """How many of the first `most` tokens have the same records in both."""
    if a_CW is None or b_CW is None:
        return most
    differ = np.flatnonzero((a_CW[:most] != b_CW[:most]).any(axis=1))
    return int(differ[0]) if differ.size else most
