"""Draw one token per row, and say with what log-probability.

Edits, temperature, then min-p, top-k, top-p, then renormalise; the token is drawn by inverting the cumulative
distribution at one uniform number. A row's result never depends on the other rows.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from millrace.core.completion.top_logprobs import Row
from millrace.core.types import Sampling
from millrace.engines.own.edits import Edits

Tensor = torch.Tensor

DIRECT_VOCAB_MAX, BLOCK = 16_384, 128
"""A larger vocabulary is drawn from in blocks of `BLOCK` tokens. Those of Qwen and Llama are multiples."""
BELOW_ONE = 1 - 2.0**-52


class SampledTokens(NamedTuple):
    """One token a row.

    tokens, logprobs  (N,), of the distribution that was sampled from
    top_logprobs      of each row the most likely tokens, as many as any row asks for
    token_masks       of each truncated row the int32 ids of all tokens that it could sample
    """

    tokens: Tensor
    logprobs: Tensor
    top_logprobs: list[Row | None]
    token_masks: list[bytes | None]


class TokenSampler:
    """Samples rows by their `samplings`. The constructor computes everything that is the same in each step.

    `edits`: of the same rows, or None if no row has edits.
    """

    def __init__(
        self, samplings: Sequence[Sampling], device: torch.device, edits: Edits | None = None
    ) -> None:
        self._edits = edits
        temperatures = [s.temperature or 1.0 for s in samplings]
        greedy = [s.temperature == 0 for s in samplings]
        cut = [i for i, sampling in enumerate(samplings) if sampling.cuts]
        self._temperature = _column(temperatures, device) if set(temperatures) != {1.0} else None
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._cut = torch.tensor(cut, device=device) if cut else None
        masked = [i for i in cut if samplings[i].token_masks]
        self._masked, self._masked_rows = torch.tensor(masked, device=device) if masked else None, masked
        self._truncation = _Truncation([samplings[i] for i in cut], device)
        self._num_top = max(sampling.logprobs for sampling in samplings)

    def __call__(self, logits_NV: Tensor, uniforms_N: Tensor) -> SampledTokens:
        """Greedy rows (temperature 0) take the largest logit (the first of equals) and record its log-prob
        at temperature 1 without truncation. Min-p keeps tokens at least that fraction as probable as the
        first, top-k exactly k tokens, and top-p the fewest whose probabilities reach p; among equal logits
        the smaller id comes first.
        """
        if self._edits is not None:
            logits_NV = self._edits(logits_NV)
        if self._temperature is not None:
            logits_NV = logits_NV / self._temperature
        if self._cut is not None:
            logits_NV = logits_NV.index_copy(0, self._cut, self._truncation(logits_NV[self._cut]))
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        # Not `logprobs_NV.exp()`, whose rounding of a number depends on its place in memory.
        tokens_N = draw(logits_NV.softmax(dim=-1), uniforms_N)
        if self._greedy is not None:
            tokens_N = torch.where(self._greedy, logits_NV.argmax(dim=-1), tokens_N)
        # A row of NaN finds no token; the caller refuses it.
        tokens_N = tokens_N.clamp(max=logits_NV.shape[1] - 1)
        if self._edits is not None:
            self._edits.note(tokens_N)
        logprobs_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        masks = self._token_masks(logits_NV)
        return SampledTokens(tokens_N, logprobs_N, self._top_logprobs(logprobs_NV), masks)

    def _top_logprobs(self, logprobs_NV: Tensor) -> list[Row | None]:
        if not self._num_top:
            return [None] * len(logprobs_NV)
        logprobs_NK, tokens_NK = logprobs_NV.topk(self._num_top)
        return list(zip(tokens_NK.tolist(), logprobs_NK.tolist(), strict=True))

    def _token_masks(self, logits_NV: Tensor) -> list[bytes | None]:
        masks: list[bytes | None] = [None] * len(logits_NV)
        if self._masked is not None:
            allowed_RV = logits_NV[self._masked] > float("-inf")
            ids = allowed_RV.nonzero()[:, 1].to(torch.int32).cpu().numpy().tobytes()
            ends = (4 * allowed_RV.sum(dim=1).cumsum(0)).tolist()
            for row, begin, end in zip(self._masked_rows, [0, *ends], ends, strict=False):
                masks[row] = ids[begin:end]
        return masks


def draw(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Invert the cumulative distribution at one float64 number in [0, 1) a row. (N,) indices; V or more for a
    row of NaN. Probability 0 is never drawn.

    Sums are in float64. For a large vocabulary so many sums take long to write. So first a block of tokens is
    drawn by the sums of blocks, then a token of that block.
    """
    if probs_NV.shape[1] <= DIRECT_VOCAB_MAX:
        cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
        thresholds = uniforms_N[:, None] * cumulative_NV[:, -1:]
        return torch.searchsorted(cumulative_NV, thresholds, right=True)[:, 0]
    missing = -probs_NV.shape[1] % BLOCK
    blocks = (F.pad(probs_NV, (0, missing)) if missing else probs_NV).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    cumulative = sums.cumsum(dim=-1)
    thresholds = uniforms_N[:, None] * cumulative[:, -1:]
    block_N1 = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=sums.shape[1] - 1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block_N1[:, 0]]
    remainder = (thresholds - (cumulative - sums).gather(1, block_N1)) / sums.gather(1, block_N1)
    return block_N1[:, 0] * BLOCK + draw(inside, remainder[:, 0].clamp(0.0, BELOW_ONE))


class _Truncation:
    """Logits with every token outside min-p, top-k and top-p at -inf."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        self._log_min_p = torch.tensor([[s.min_p] for s in samplings], device=device).log()
        self._unlimited = torch.tensor([[s.top_k == 0] for s in samplings], device=device)
        self._top_k = torch.tensor([[s.top_k] for s in samplings], device=device)
        self._top_p = torch.tensor([[s.top_p] for s in samplings], dtype=torch.float64, device=device)

    def __call__(self, logits_NV: Tensor) -> Tensor:
        ranked, order = logits_NV.sort(dim=-1, descending=True, stable=True)
        ranked = ranked.masked_fill(ranked < ranked[:, :1] + self._log_min_p, float("-inf"))
        rank = torch.arange(logits_NV.shape[1], device=logits_NV.device)
        ranked = ranked.masked_fill((rank >= self._top_k) & ~self._unlimited, float("-inf"))
        probs = ranked.double().softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        # The first token has nothing before it and always stays; p = 1 must not cut on rounding.
        ranked = ranked.masked_fill((before >= self._top_p) & (self._top_p < 1), float("-inf"))
        return torch.empty_like(logits_NV).scatter_(1, order, ranked)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None]
