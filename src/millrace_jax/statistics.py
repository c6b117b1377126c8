"""The statistics of a step's tokens, kept on the device over sets of rows and read once.

Shape suffixes: R rows, N trained tokens of a row, K the trained tokens of a set of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms import Algorithm
from millrace.trainer.metrics import Statistics
from millrace_jax.gradients import Outputs, Tokens


class JaxStatistics:
    """The statistics of tokens that `algorithm` trains."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._cap, self._weight_of = algorithm.weight_cap, algorithm.weight_of
        self._has_reference = algorithm.needs_reference
        self._sets: list[tuple[Tokens, Outputs, Any, bool, bool]] = []

    def add(self, tokens: Tokens, outputs: Outputs, of_gain: Any, *, at_start: bool, first: bool) -> None:
        """`of_gain`: the gradient of the gain with respect to log-probs, (R, N). `at_start`: the outputs are
        those of the batch's beginning. `first`: the tokens have not been added yet."""
        self._sets.append((tokens, outputs, of_gain, at_start, first))

    def read(self) -> Statistics:
        judged, silenced = list[int](), list[int]()
        columns: list[dict[str, NDArray[Any]]] = []
        for tokens, outputs, of_gain, at_start, first in self._sets:
            valid, advantages = tokens.valid, tokens.advantages
            judged_RN = valid & (advantages != 0)
            judged.append(judged_RN.sum())
            silenced.append((judged_RN & (np.asarray(of_gain) == 0)).sum())
            if first:
                before = np.asarray(outputs.logprobs) if at_start else tokens.proximal
                columns.append(self._columns(tokens, before, np.asarray(outputs.entropies)))
        joined: dict[str, Any] = {
            name: np.concatenate([each[name] for each in columns]) for name in (columns or [{}])[0]
        }
        return Statistics(**joined, cap=self._cap, judged=np.array(judged), silenced=np.array(silenced))

    def _columns(
        self, tokens: Tokens, before_RN: NDArray[Any], entropy_RN: NDArray[Any]
    ) -> dict[str, NDArray[Any]]:
        valid = tokens.valid
        log_K = (before_RN - tokens.behavior)[valid]
        weight_K, sequence_K = log_K, tokens.sequence[valid]
        if self._weight_of != "token":
            weight_K = np.bincount(sequence_K, log_K)[sequence_K].astype(log_K.dtype)
            weight_K = weight_K if self._weight_of == "product" else weight_K / tokens.trained[valid]
        columns = {
            "log_ratio_N": log_K,
            "entropy_N": entropy_RN[valid],
            "staleness_N": tokens.staleness[valid].astype(np.int64),
            "after_swap_N": tokens.after_swap[valid] > 0,
            "log_weight_N": weight_K,
        }
        if self._has_reference:
            columns["reference_N"] = (before_RN - tokens.reference)[valid]
        return columns
