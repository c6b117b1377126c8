"""The state that decode steps of the same continuations share: computed once, then moved on token by token.

A `DecodeBatch` covers slots [0, count). The batch is valid while the slots hold the same continuations, each
continuation has all but its last token computed, and the longest stays in its bucket of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from millrace.engines.own.accelerated.flash import RecordedSteps
from millrace.engines.own.accelerated.native import NativeRows
from millrace.engines.own.attention import DecodeAttention
from millrace.engines.own.cache import KVCache
from millrace.engines.own.sampler import SampledTokens, TokenSampler
from millrace.engines.own.sampling_options import Edits
from millrace.rollout.continuation import Continuation
from millrace.rollout.noise import Noise

Tensor = torch.Tensor


class DecodeBatch:
    """The `ready` slots of `running`. Slots between them are computed and ignored: they write beyond their
    valid positions.

    Attributes:
        continuations  of the ready slots, in their order
        tokens     (M,) the last token of each slot; M = `pad` of the number of slots, or as `recorded` pads
        positions  (M,) the position of that token
        attention  None if the steps are `recorded`, which have an attention of their own
        rows       the ready slots, or None if these are all of [0, count)
    """

    def __init__(
        self,
        running: Sequence[Continuation],
        ready: Sequence[int],
        cache: KVCache,
        *,
        pad: Callable[[int], int],
        attention: Callable[[list[int]], DecodeAttention | NativeRows],
        vocab: int,
        recorded: RecordedSteps | None = None,
    ) -> None:
        self.slots, self.count = list(ready), ready[-1] + 1
        self.continuations = [running[slot] for slot in ready]
        works = [continuation.work for continuation in self.continuations]
        positions, padding = cache.lengths[: self.count], [0] * (pad(self.count) - self.count)
        device = cache.values.device
        last = [continuation.tokens[-1] for continuation in running[: self.count]]
        self.attention: DecodeAttention | NativeRows | None = None
        if recorded is not None:
            self.tokens, self.positions, self._steps_left = recorded.place(last, positions)
        else:
            self.attention = attention(positions)
            self._steps_left = self.attention.num_steps
            self.tokens = torch.tensor(last + padding, device=device)
            self.positions = torch.tensor(positions + padding, device=device)
        self.rows = None if len(ready) == self.count else torch.tensor(self.slots, device=device)
        samplings, edits = [work.sampling for work in works], None
        if any(sampling.edits for sampling in samplings):
            sequences = [continuation.turns for continuation in self.continuations]
            edits = Edits(samplings, sequences, vocab=vocab, device=device)
        self.sampler = TokenSampler(samplings, device, edits)
        noise = Noise([work.seed for work in works], [work.trajectory_id for work in works])
        lengths = [continuation.completion_length for continuation in self.continuations]
        self._uniforms = torch.from_numpy(noise.uniforms(lengths, self._steps_left).T).to(device)

    def sample(self, logits: Tensor) -> SampledTokens:
        """The next token of each continuation. `logits`: of the ready slots."""
        return self.sampler(logits, self._uniforms[-self._steps_left])

    def advance(self, tokens: Tensor) -> bool:
        """Go on to the next position with `tokens`, one for every slot. False: the next step needs another
        batch."""
        assert self.rows is None, self.slots
        self._steps_left -= 1
        if self.attention is not None:
            self.attention.advance()
        self.tokens[: self.count] = tokens
        self.positions[: self.count] += 1
        return self._steps_left > 0
