"""What an objective may look at: log-probs of tokens and of sequences, the ratio of two policies and their
KL, and the array functions that it may use.

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


# ---------------------------------------------------------------- two policies


LOG_MAX = 20.0  # nats: exp(20) = 4.9e8; from 89 on, exp overflows in float32


def log_ratio(xp: Namespace, logprobs: TokenLogprobs, *, anchor: str, level: str) -> Any:
    """log(pi / pi_anchor) as a constant, within +-LOG_MAX.

        token     log pi(t) - log pi_anchor(t)
        sequence  the mean of that over the trained tokens of the sequence: the log of the geometric mean

    Source:
        GSPO, arXiv:2507.18071, equation 7 (sequence). verl has the same bounds.
    """
    anchor_N = logprobs.behavior_N if anchor == "behavior" else logprobs.proximal_N
    log_N = logprobs.fixed_N - anchor_N
    if level == "sequence":
        log_N = logprobs.sequences.mean(log_N)
    return xp.clip(log_N, -LOG_MAX, LOG_MAX)


def with_gradient(xp: Namespace, log_N: Any, logprobs: TokenLogprobs) -> Any:
    """The ratio itself: its value is exp(log_N), and its gradient that of the token's probability.

        u = sg[exp(log_N)] pi / sg[pi]

    Summed over a sequence with weights of 1 / length, that is the gradient of the sequence's ratio, wherever
    its tokens share one advantage.
    Source:
        GSPO-token, arXiv:2507.18071, equation 14.
    """
    return xp.exp(log_N + (logprobs.current_N - logprobs.fixed_N))


def kl(xp: Namespace, current_N: Any, reference_N: Any, *, estimator: str) -> Any:
    """Estimate KL(pi || pi_ref) per token from the sampled token alone.

        d  = log(pi_ref / pi), within +-LOG_MAX
        k1 = -d              unbiased, of either sign; as a loss its gradient has the mean 0
        k2 = d^2 / 2         biased; as a loss its mean gradient is that of KL(pi || pi_ref)
        k3 = exp(d) - d - 1  unbiased, never negative; as a loss its mean gradient is that of KL(pi_ref || pi)

    Shapes:
        current_N, reference_N  (N,) log-probs in nats
        returns                 (N,)
    Degenerate:
        Equal log-probs -> 0, of k2 and k3 with gradient 0.
        A difference beyond the bound -> the value at the bound, with gradient 0.
    Source:
        http://joschu.net/blog/kl-approx.html; k3 as a loss: GRPO, arXiv:2402.03300, equation 4. Unbiased for
        tokens sampled from pi; for stale tokens it is a penalty, not an estimate. The bound is verl's, which
        also clamps k3 itself to 10. We do not: beyond a difference of 2.6 nats the penalty would lose its
        gradient. TRL clamps nothing. Gradients as losses: arXiv:2510.01555.
    """
    difference_N = xp.clip(reference_N - current_N, -LOG_MAX, LOG_MAX)
    match estimator:
        case "k1":
            return -difference_N
        case "k2":
            return difference_N * difference_N / 2.0
        case _:
            return xp.exp(difference_N) - difference_N - 1.0
