"""Bad sequences that the policy has left behind. Shape suffix: N = tokens."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.logprobs import Namespace, TokenLogprobs


def not_drifted(xp: Namespace, logprobs: TokenLogprobs, advantages_N: Any, *, drift: float) -> Any:
    """0 for a sequence that is bad and that the current policy would hardly sample, else 1; a constant.

        0  where  A < 0  and  mean over the sequence of log(mu / pi) > drift

    What a policy does not do any more teaches it little, and such sequences have the largest ratios of other
    tokens. Good sequences stay, however old.

    Source:
        DeepSeek-V3.2, arXiv:2512.02556, section 3.1 (off-policy sequence masking; mu there: what the engine
        recorded). Its threshold is not published. Trinity-RFT (pull request 420) found 0.05 to 0.2
        reasonable, TRL's documentation begins with 0.5; the preset has 0.1.
    """
    gone_N = logprobs.sequences.mean(logprobs.behavior_N - logprobs.fixed_N)
    return xp.where((advantages_N < 0) & (gone_N > drift), 0 * gone_N, 0 * gone_N + 1.0)
