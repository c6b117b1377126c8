"""Draw one token per row, and say with what log-probability.

Temperature, then top-k, then top-p, then renormalise; the token is drawn by inverting the cumulative
distribution at one uniform number. A row's result never depends on the other rows.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from millrace.core.types import Sampling

Tensor = torch.Tensor


def sample(logits_NV: Tensor, samplings: Sequence[Sampling], uniforms_N: np.ndarray) -> tuple[Tensor, Tensor]:
    """Tokens (N,) and log-probs (N,) of the distribution really sampled from.

    Greedy rows (temperature 0) take the largest logit (the first of equals) and record its log-prob
    at temperature 1 without truncation. Top-k keeps exactly k tokens and top-p the fewest whose
    probabilities reach p; among equal logits the smaller id comes first.
    """
    device = logits_NV.device
    temperature = torch.tensor([s.temperature or 1.0 for s in samplings], device=device)
    logits_NV = logits_NV / temperature[:, None]
    cut = [i for i, s in enumerate(samplings) if s.temperature > 0 and (s.top_k > 0 or s.top_p < 1)]
    if cut:
        rows = torch.tensor(cut, device=device)
        logits_NV[rows] = _truncated(logits_NV[rows], [samplings[i] for i in cut])
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cumulative_NV = logprobs_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    uniforms = torch.from_numpy(uniforms_N).to(device)[:, None]
    tokens_N = torch.searchsorted(cumulative_NV, uniforms * cumulative_NV[:, -1:], right=True)[:, 0]
    if any(s.temperature == 0 for s in samplings):
        greedy = torch.tensor([s.temperature == 0 for s in samplings], device=device)
        tokens_N = torch.where(greedy, logits_NV.argmax(dim=-1), tokens_N)
    # A row of NaN finds no token; it is the caller's to refuse.
    tokens_N = tokens_N.clamp(max=logits_NV.shape[1] - 1)
    return tokens_N, logprobs_NV.gather(1, tokens_N[:, None])[:, 0]


def _truncated(logits_NV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits with every token outside top-k and top-p at -inf."""
    device, vocab = logits_NV.device, logits_NV.shape[1]
    top_k = torch.tensor([s.top_k or vocab for s in samplings], device=device)[:, None]
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)[:, None]
    ranked, order = logits_NV.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(vocab, device=device) >= top_k, float("-inf"))
    probs = ranked.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    # The first token has nothing before it and always stays; p = 1 must not cut on rounding.
    ranked = ranked.masked_fill((before >= top_p) & (top_p < 1), float("-inf"))
    return torch.empty_like(logits_NV).scatter_(1, order, ranked)
