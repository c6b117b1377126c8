"""`Sequences` in plain array operations, for any namespace: the reference of what the trainer computes.

Shape suffixes: N = tokens, S = sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DenseSequences:
    """Of tokens that are all at hand. `member_SN`: 1 where token n belongs to sequence s, or else 0.

    Its memory is S x N: for tests and examples. It takes constants: `TokenLogprobs.fixed_N` and the others.
    """

    member_SN: Any

    @staticmethod
    def of(xp: Any, ids_N: Any, like_N: Any) -> DenseSequences:
        """`ids_N`: each token's sequence, from 0 on; `like_N`: an array of the type to compute in."""
        ids = [int(i) for i in ids_N]
        rows = [[float(i == sequence) for i in ids] for sequence in range(max(ids) + 1)]
        return DenseSequences(xp.asarray(rows, dtype=like_N.dtype))

    def total(self, x_N: Any) -> Any:
        return self.member_SN.T @ (self.member_SN @ x_N)

    def mean(self, x_N: Any) -> Any:
        return self.total(x_N) / (self.member_SN.T @ self.member_SN.sum(1))
