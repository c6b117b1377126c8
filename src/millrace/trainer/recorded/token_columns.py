"""What a trajectory's record says of its tokens, as arrays of one entry per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.core.completion.forks import continued
from millrace.core.errors import DataError
from millrace.core.types import TrainSequence


def mask_of(sequence: TrainSequence) -> NDArray[np.bool_]:
    """The loss mask."""
    if sequence.mask is None:
        return np.ones(len(sequence.columns), dtype=bool)
    return np.asarray(sequence.mask, dtype=bool)


def reference_of(sequence: TrainSequence) -> NDArray[np.float64]:
    """Log-probs under the reference; NaN: the trainer computes them."""
    if sequence.reference is None:
        return np.full(len(sequence.columns), np.nan)
    return np.asarray(sequence.reference, float)


def versions_of(sequence: TrainSequence) -> NDArray[np.int64]:
    """The version that sampled each token."""
    return _repeated(sequence.columns.runs)


def numbers_of(sequence: TrainSequence) -> NDArray[np.int64]:
    """Which sequence of the trajectory each token belongs to (`core.completion.forks.continued`)."""
    return _repeated(continued(sequence.columns.forks, len(sequence.columns)))


def _repeated(runs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    value, count = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(value, count)


def refuse_misaligned(sequence: TrainSequence, version: int) -> None:
    """Before the batch of `version`.

    Raises: DataError: a mask of another length than its tokens, a token of a newer version, or a log-prob of
    a trained token that is not finite.
    """
    mask, columns = mask_of(sequence), sequence.columns
    if len(mask) != len(columns):
        raise DataError(
            f"trajectory {sequence.trajectory_id} does not align: {len(columns)} tokens, "
            f"{len(mask)} mask entries"
        )
    trained = np.asarray(columns.logprobs)[mask]
    if not np.isfinite(trained).all():
        raise DataError(
            f"trajectory {sequence.trajectory_id} has behavior log-probs that are not finite: "
            f"{trained[~np.isfinite(trained)].tolist()[:5]}. The engine must record the log-probs of sampled "
            "tokens"
        )
    newest = max((run_version for run_version, _ in columns.runs), default=version)
    if newest > version:
        raise DataError(
            f"trajectory {sequence.trajectory_id} has a token of version {newest}, "
            f"newer than the trainer's version {version}"
        )
