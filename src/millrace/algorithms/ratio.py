"""The ratio of two policies, of a token or of its whole sequence. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace, TokenLogprobs

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
