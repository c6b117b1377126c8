"""Min-p, top-k and top-p. The vocabulary is sorted only where a row has a top-p and no top-k.

Shape suffixes: N rows, V vocabulary, K the tokens that are ranked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace.core.types import Sampling

Tensor = torch.Tensor

UNLIMITED = 1 << 31
"""The top-k of a row without one: more than any vocabulary has."""


class Truncation:
    """Logits with every token outside min-p, top-k and top-p at -inf.

    Min-p keeps tokens at least that fraction as probable as the first, top-k exactly k tokens, and top-p the
    fewest whose probabilities reach p. Among equal logits the smaller id comes first.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        self._log_min_p = self._top_k = self._top_p = None
        if any(s.min_p for s in samplings):
            self._log_min_p = column([s.min_p for s in samplings], torch.float32).log()
        self._k_max = max((s.top_k for s in samplings), default=0)
        if self._k_max:
            self._top_k = column([s.top_k or UNLIMITED for s in samplings], torch.int64)
        if any(s.top_p < 1 for s in samplings):
            self._top_p = column([s.top_p for s in samplings], torch.float64)
        self._sorts = any(s.top_p < 1 and not s.top_k for s in samplings)

    def __call__(self, logits_NV: Tensor) -> Tensor:
        if self._log_min_p is not None:
            lowest = logits_NV.amax(dim=-1, keepdim=True) + self._log_min_p
            logits_NV = logits_NV.masked_fill(logits_NV < lowest, float("-inf"))
        if self._top_k is not None:
            logits_NV = self._first(logits_NV, self._top_k)
        return logits_NV if self._top_p is None else self._likely(logits_NV, self._top_p)

    def _first(self, logits_NV: Tensor, top_k: Tensor) -> Tensor:
        """Top-k: all tokens above the k-th logit, and of its equals the first."""
        values_NK = logits_NV.topk(min(self._k_max, logits_NV.shape[1])).values
        last = values_NK.gather(1, (top_k - 1).clamp(max=values_NK.shape[1] - 1))
        last = last.masked_fill(top_k > values_NK.shape[1], float("-inf"))
        above_NV, equal_NV = logits_NV > last, logits_NV == last
        room = top_k - above_NV.sum(dim=-1, keepdim=True)
        first_NV = equal_NV.cumsum(dim=-1, dtype=torch.int32) <= room
        return logits_NV.masked_fill(~(above_NV | (equal_NV & first_NV)), float("-inf"))

    def _likely(self, logits_NV: Tensor, top_p: Tensor) -> Tensor:
        ranked_NK, tokens_NK = self._ranked(logits_NV)
        probs_NK = ranked_NK.double().softmax(dim=-1)
        before_NK = probs_NK.cumsum(dim=-1) - probs_NK
        # The first token has nothing before it and always stays; p = 1 must not cut on rounding.
        ranked_NK = ranked_NK.masked_fill((before_NK >= top_p) & (top_p < 1), float("-inf"))
        return logits_NV.scatter(1, tokens_NK, ranked_NK)

    def _ranked(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Logits from the largest on, and their tokens: as many as any top-k leaves."""
        if self._sorts or 4 * self._k_max >= logits_NV.shape[1]:
            ranked_NV, tokens_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
            return ranked_NV, tokens_NV
        tokens_NK = logits_NV.topk(self._k_max, sorted=False).indices.sort(dim=-1).values
        ranked_NK, order_NK = logits_NV.gather(1, tokens_NK).sort(dim=-1, descending=True, stable=True)
        return ranked_NK, tokens_NK.gather(1, order_NK)
