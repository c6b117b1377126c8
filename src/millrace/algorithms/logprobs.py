"""What an objective may look at, and the array functions it may use.

Shape suffixes: N = tokens, in any order; S = sequences of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Namespace(Protocol):
    """The subset of the array API that objectives use: `torch`, `jax.numpy` and `numpy` all have it."""

    def exp(self, x: Any, /) -> Any: ...
    def log(self, x: Any, /) -> Any: ...
    def minimum(self, x1: Any, x2: Any, /) -> Any: ...
    def maximum(self, x1: Any, x2: Any, /) -> Any: ...
    def clip(self, x: Any, min: float, max: float, /) -> Any: ...
    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any: ...


class Sequences(Protocol):
    """Which of the tokens belong together: those that are trained of one trajectory.

    Both are collective calls where ranks share a sequence: every rank makes them, also for no token. What
    they return is a constant. A paper's gradient of a sequence's ratio s is kept by writing it as
    sg[s] pi / sg[pi], which has the value and the gradient of s wherever a sequence has one advantage.
    """

    def total(self, x_N: Any) -> Any:
        """For each token the sum over its sequence: (N,), without gradient."""
        ...

    def mean(self, x_N: Any) -> Any:
        """For each token the mean over its sequence: (N,), without gradient."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs of the same N tokens, in nats, under each policy. Gradients flow into `current_N` and
    `entropy_N` alone.

    `fixed_N` equals `current_N` as a constant (`detach`, `stop_gradient`): the array API has no
    stop-gradient, so the framework supplies it. A micro-batch may hold any tokens of any sequences, so
    nothing but `sequences` may combine tokens.
    """

    current_N: Any
    fixed_N: Any
    behavior_N: Any
    proximal_N: Any
    reference_N: Any = None
    sequences: Any = None
    entropy_N: Any = None


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
