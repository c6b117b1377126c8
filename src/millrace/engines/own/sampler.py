"""Draw one token per row, and say with what log-probability.

Edits, temperature, then min-p, top-k, top-p, then renormalise; the token is drawn by inverting the cumulative
distribution at one uniform number. A row's result never depends on the other rows. The vocabulary is sorted
only where a row has a top-p and no top-k. On a GPU all but the edits is one kernel, which does not sort.

Shape suffixes: N rows, V vocabulary, K the tokens that are ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from millrace.core.completion.top_logprobs import Row
from millrace.core.types import Sampling
from millrace.devices.operators import OPERATORS
from millrace.engines.own.accelerated.drawn import UNLIMITED, has_kernel, settings_of
from millrace.engines.own.sampling_options import Edits

Tensor = torch.Tensor

DIRECT_VOCAB_MAX, BLOCK = 16_384, 128
"""A larger vocabulary is drawn from in blocks of `BLOCK` tokens. Those of Qwen and Llama are multiples."""
BELOW_ONE = 1 - 2.0**-52


class SampledTokens(NamedTuple):
    """One token a row. All is on the device, and the host did not wait.

    tokens, logprobs  (N,), of the distribution that was sampled from
    top               the most likely tokens, as many as any row asks for, and their log-probs; (N, K) each
    allowed_RV        of each row that wants a token mask, which tokens it could sample
    """

    tokens: Tensor
    logprobs: Tensor
    top: tuple[Tensor, Tensor] | None
    allowed_RV: Tensor | None


class TokenSampler:
    """Samples rows by their `samplings`. The constructor computes everything that is the same in each step.

    `edits`: of the same rows, or None if no row has edits.
    """

    def __init__(
        self, samplings: Sequence[Sampling], device: torch.device, edits: Edits | None = None
    ) -> None:
        self._edits, self._settings = edits, None
        cut = [i for i, sampling in enumerate(samplings) if sampling.cuts]
        masked = [i for i in cut if samplings[i].token_masks]
        self._masked_rows = masked
        self._num_top = max(sampling.logprobs for sampling in samplings)
        if not self._num_top and has_kernel(device, TokenSampler):
            self._settings = settings_of(samplings, masked).to(device)
            return
        temperatures = [s.temperature or 1.0 for s in samplings]
        greedy = [s.temperature == 0 for s in samplings]
        self._temperature = _column(temperatures, device) if set(temperatures) != {1.0} else None
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._cut = torch.tensor(cut, device=device) if cut else None
        self._masked = torch.tensor(masked, device=device) if masked else None
        self._truncation = Truncation([samplings[i] for i in cut], device)

    def __call__(self, logits_NV: Tensor, uniforms_N: Tensor) -> SampledTokens:
        """Greedy rows (temperature 0) take the largest logit (the first of equals) and record its log-prob
        at temperature 1 without truncation.
        """
        if self._edits is not None:
            logits_NV = self._edits(logits_NV)
        if self._settings is None:
            sampled = self._sampled(logits_NV, uniforms_N)
        else:
            masks = len(self._masked_rows)
            tokens_N, logprobs_N, allowed_RV = OPERATORS.drawn(logits_NV, uniforms_N, self._settings, masks)
            sampled = SampledTokens(tokens_N, logprobs_N, None, allowed_RV if masks else None)
        if self._edits is not None:
            self._edits.note(sampled.tokens)
        return sampled

    def _sampled(self, logits_NV: Tensor, uniforms_N: Tensor) -> SampledTokens:
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
        logprobs_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        top = logprobs_NV.topk(self._num_top) if self._num_top else None
        allowed_RV = logits_NV[self._masked] > float("-inf") if self._masked is not None else None
        likely = None if top is None else (top.indices, top.values)
        return SampledTokens(tokens_N, logprobs_N, likely, allowed_RV)

    def top_logprobs(self, sampled: SampledTokens) -> list[Row | None]:
        """Of each row the most likely tokens and their log-probs. The host waits."""
        if sampled.top is None:
            return [None] * len(sampled.tokens)
        return list(zip(*(x_NK.tolist() for x_NK in sampled.top), strict=True))

    def token_masks(self, sampled: SampledTokens) -> list[bytes | None]:
        """Of each truncated row the int32 ids of all tokens that it could sample. The host waits."""
        masks: list[bytes | None] = [None] * len(sampled.tokens)
        if sampled.allowed_RV is not None:
            rows, ids = sampled.allowed_RV.nonzero().to(torch.int32).cpu().numpy().T
            ends = np.searchsorted(rows, np.arange(1, len(self._masked_rows)))
            for row, tokens in zip(self._masked_rows, np.split(ids, ends), strict=True):
                masks[row] = tokens.tobytes()
        return masks


def draw(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Invert the cumulative distribution at one float64 number in [0, 1) a row. (N,) indices; V or more for a
    row of NaN. Probability 0 is never drawn.

    Cumulative sums are in float64. For a large vocabulary so many sums take long to write. So first a block
    of tokens is drawn by the sums of blocks, then a token of that block.
    """
    if probs_NV.shape[1] <= DIRECT_VOCAB_MAX:
        cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
        thresholds = uniforms_N[:, None] * cumulative_NV[:, -1:]
        return torch.searchsorted(cumulative_NV, thresholds, right=True)[:, 0]
    missing = -probs_NV.shape[1] % BLOCK
    blocks = (F.pad(probs_NV, (0, missing)) if missing else probs_NV).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1).double()  # torch would sum in float64 a copy of all probabilities
    cumulative = sums.cumsum(dim=-1)
    thresholds = uniforms_N[:, None] * cumulative[:, -1:]
    block_N1 = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=sums.shape[1] - 1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block_N1[:, 0]]
    remainder = (thresholds - (cumulative - sums).gather(1, block_N1)) / sums.gather(1, block_N1)
    return block_N1[:, 0] * BLOCK + draw(inside, remainder[:, 0].clamp(0.0, BELOW_ONE))


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None]


# ---------------------------------------------------------------- truncation


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
