"""The statistics of a step's tokens, kept on the device over micro-batches and read once.

Shape suffix: N = trained tokens of one row.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from millrace.algorithms import Algorithm, TokenLogprobs
from millrace.trainer.metrics import Statistics
from millrace.trainer.ranks.mesh import Ranks

Columns = dict[str, torch.Tensor]
"""Columns of `Statistics`, by name, of one row."""


def token_columns(
    algorithm: Algorithm, logprobs: TokenLogprobs, before_N: torch.Tensor, entropy_N: torch.Tensor
) -> Columns:
    """`before_N`: log-probs under the weights at the batch's beginning."""
    log_N = before_N - logprobs.behavior_N
    columns = {"log_ratio_N": log_N, "log_weight_N": log_N, "entropy_N": entropy_N.detach()}
    if algorithm.weight_of != "token":
        combined = logprobs.sequences.total if algorithm.weight_of == "product" else logprobs.sequences.mean
        columns["log_weight_N"] = combined(log_N)
    if logprobs.reference_N is not None:
        columns["reference_N"] = before_N - logprobs.reference_N
    return columns


def silenced_columns(gradient_N: torch.Tensor, advantages_N: torch.Tensor) -> Columns:
    """Count the tokens of an optimizer step with an advantage, and those of them without a gradient.
    `gradient_N` is without the gradient of a penalty."""
    judged_N = advantages_N != 0
    return {"judged": judged_N.sum()[None], "silenced": (judged_N & (gradient_N == 0)).sum()[None]}


class TokenStatistics:
    """Columns of the trained tokens of a batch."""

    def __init__(self, algorithm: Algorithm, ranks: Ranks) -> None:
        self._cap, self._ranks = algorithm.weight_cap, ranks
        self._columns = defaultdict[str, list[torch.Tensor]](list)

    def add(self, of_row: Columns) -> None:
        for name, column in of_row.items():
            self._columns[name].append(column)

    def read(self) -> Statistics:
        """All columns of every rank's tokens on the host, the same on every rank. A collective call."""
        local = {name: torch.cat(columns).cpu().numpy() for name, columns in self._columns.items()}
        # Ranks of a tensor group have the same tokens.
        of_ranks = self._ranks.gather(local if self._ranks.tensor_index == 0 else {})
        names = {name for of_rank in of_ranks for name in of_rank}
        columns: dict[str, Any] = {
            name: np.concatenate([each[name] for each in of_ranks if name in each]) for name in names
        }
        return Statistics(**columns, cap=self._cap)
