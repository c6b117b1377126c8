"""Edits of logits before the temperature: banned and allowed tokens, and penalties on repeated tokens.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace.core.types import Sampling

Tensor = torch.Tensor


class Edits:
    """Edits the logits l of N sequences that grow by one token with each `note`.

        l <- l / r where l > 0, else l r      of every token in the prompt or the completion
        l <- l - f count - p [count > 0]      count: of a token in the completion
        l <- -inf                             of banned tokens, and of every token that is not allowed

    with `repetition_penalty` r, `frequency_penalty` f, `presence_penalty` p. Source of the first edit: CTRL,
    arXiv:1909.05858, there without the second case. The order is that of vLLM's sampler.
    """

    def __init__(
        self,
        samplings: Sequence[Sampling],
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        vocab: int,
        device: torch.device,
    ) -> None:
        """`sequences`: prompt and completion so far."""
        penalties = [[s.repetition_penalty, s.frequency_penalty, s.presence_penalty] for s in samplings]
        self._penalties = torch.tensor(penalties, device=device).T[:, :, None]  # each (N, 1)
        counts = torch.zeros((len(samplings), vocab))
        prompted, banned = counts.bool(), counts.bool()
        for row, (sampling, (prompt, completion)) in enumerate(zip(samplings, sequences, strict=True)):
            prompted[row, list(prompt)] = True
            counts[row] = torch.bincount(torch.tensor(completion, dtype=torch.long), minlength=vocab)
            if sampling.allowed_token_ids is not None:
                banned[row] = True
                banned[row, list(sampling.allowed_token_ids)] = False
            banned[row, list(sampling.banned_token_ids)] = True
        self._counts_NV, self._prompted_NV = counts.to(device), prompted.to(device)
        self._banned_NV = banned.to(device)

    def __call__(self, logits_NV: Tensor) -> Tensor:
        repetition, frequency, presence = self._penalties
        sampled_NV = self._counts_NV > 0
        repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition, logits_NV * repetition)
        logits_NV = torch.where(sampled_NV | self._prompted_NV, repeated_NV, logits_NV)
        logits_NV = logits_NV - frequency * self._counts_NV - presence * sampled_NV
        return logits_NV.masked_fill_(self._banned_NV, float("-inf"))

    def note(self, tokens_N: Tensor) -> None:
        """Count each row's next token."""
        self._counts_NV[torch.arange(len(tokens_N), device=tokens_N.device), tokens_N] += 1
