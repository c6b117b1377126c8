"""Edits of logits before the temperature: banned and allowed tokens, and penalties on repeated tokens.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from millrace.core.completion.routing import Routing
from millrace.core.types import Sampling
from millrace.devices.gpu import on
from millrace.engines.own.architecture import Architecture
from millrace.rollout.continuation import Continuation

Tensor = torch.Tensor


class Edits:
    """Edits the logits l of N sequences that grow by one token with each `note`.

        l <- l / r where l > 0, else l r      of every token of the sequence so far
        l <- l - f count - p [count > 0]      count: of a token in what was sampled in the present turn
        l <- -inf                             of banned tokens, and of every token that is not allowed

    with `repetition_penalty` r, `frequency_penalty` f, `presence_penalty` p. Source of the first edit: CTRL,
    arXiv:1909.05858, there without the second case. The order, and what each counts, are those of vLLM's
    sampler, to which a turn is a request: it counts what the request put out, not its prompt.
    """

    def __init__(
        self,
        samplings: Sequence[Sampling],
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        vocab: int,
        device: torch.device,
    ) -> None:
        """`sequences`: what precedes the present turn, and the turn so far."""
        penalties = [[s.repetition_penalty, s.frequency_penalty, s.presence_penalty] for s in samplings]
        self._penalties = torch.tensor(penalties, device=device).T[:, :, None]  # each (N, 1)
        self._counts_NV = torch.zeros((len(samplings), vocab), device=device)
        self._prompted_NV = torch.zeros((len(samplings), vocab), dtype=torch.bool, device=device)
        banned = torch.tensor([[s.allowed_token_ids is not None] for s in samplings], device=device)
        self._banned_NV = banned.repeat(1, vocab)
        true = torch.ones((), dtype=torch.bool, device=device)
        put = partial(_positions, device)
        self._counts_NV.index_put_(put([c for _, c in sequences]), true.float(), accumulate=True)
        self._prompted_NV.index_put_(put([prompt for prompt, _ in sequences]), true)
        self._banned_NV.index_put_(put([s.allowed_token_ids or () for s in samplings]), ~true)
        self._banned_NV.index_put_(put([s.banned_token_ids for s in samplings]), true)

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


def _positions(device: torch.device, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Row and column of each token of each row."""
    rows = np.repeat(np.arange(len(tokens)), [len(row) for row in tokens])
    columns = np.fromiter((token for row in tokens for token in row), np.int64, len(rows))
    return on(device, rows), on(device, columns)


def routing_memory(architecture: Architecture, rows: int, device: torch.device) -> torch.Tensor:
    """Memory for the experts of a decode step: (rows, layers with experts, experts of a row). Recorded steps
    write into the same memory every time."""
    layers = [shape for name, shape in architecture.shapes.items() if name.endswith(".experts.gate_up_proj")]
    dtype = torch.uint8 if Routing.typecode(layers[0][0]) == "B" else torch.uint16
    return torch.zeros((rows, len(layers), architecture.routed), dtype=dtype, device=device)


def recorded_routing(
    experts_MLK: torch.Tensor | None, continuations: Sequence[Continuation], rows: Sequence[int]
) -> list[Routing | None]:
    """The experts of each of `continuations` that asks for them, after a pass where it had this row."""
    wanted = [continuation.work.sampling.routing for continuation in continuations]
    if experts_MLK is None or not any(wanted):
        return [None] * len(wanted)
    typecode = "B" if experts_MLK.dtype == torch.uint8 else "H"
    experts = experts_MLK[: max(rows) + 1].flatten(1).cpu().numpy()[list(rows)]
    return [
        Routing(row.size, array(typecode, row.tobytes())) if asked else None
        for row, asked in zip(experts, wanted, strict=True)
    ]
