"""The experts that the engine sampled each token with, as arrays. `replay` trains with them.

Shape suffixes: C = completion tokens of a sequence, W = layers with experts x experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.core.completion.routing import Routing
from millrace.core.errors import DataError
from millrace.core.types import TrainSequence

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
