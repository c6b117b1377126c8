"""One pass that verifies drafts: of each row its last token and the draft behind it.

Noise is a pure function of the position. So every position is sampled with its own noise, as decode steps
would do one after another. A draft token stands if it is the sampled one. The first sampled token that
differs ends the row's part of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from millrace.engines.own.attention import Segment
from millrace.engines.own.cache import KVCache
from millrace.engines.own.sampler import SampledTokens, TokenSampler
from millrace.engines.own.sampling_options import Edits
from millrace.rollout.continuation import Continuation
from millrace.rollout.noise import Noise

Tensor = torch.Tensor


class Verification:
    """The rows of the `slots` of `running`, each with its draft.

    Attributes:
        segments  of each row, its last token and its draft
        starts    of each row, its first position among all positions; and at the end their number M
        owners    of each position its continuation
        tokens, positions  (padded M,)
    """

    def __init__(
        self,
        running: Sequence[Continuation],
        slots: Sequence[int],
        drafts: Sequence[Sequence[int]],
        cache: KVCache,
        *,
        pad: Callable[[int], int],
        vocab: int,
    ) -> None:
        self.slots, self.drafts = slots, drafts
        self.continuations, device = [running[slot] for slot in slots], cache.values.device
        counts = [1 + len(draft) for draft in drafts]
        self.segments = [
            Segment(slot, cache.lengths[slot], count) for slot, count in zip(slots, counts, strict=True)
        ]
        self.starts = [0, *accumulate(counts)]
        self.count = self.starts[-1]
        rows = list(zip(self.continuations, drafts, counts, strict=True))
        self.owners = [row for row, _, count in rows for _ in range(count)]
        padding = [0] * (pad(self.count) - self.count)
        tokens = [token for row, draft, _ in rows for token in (row.tokens[-1], *draft)]
        positions = [s.start + i for s in self.segments for i in range(s.count)]
        self.tokens = torch.tensor(tokens + padding, device=device)
        self.positions = torch.tensor(positions + padding, device=device)
        samplings, edits = [row.work.sampling for row in self.owners], None
        if any(sampling.edits for sampling in samplings):
            turns = [(*row.turns, draft, count) for row, draft, count in rows]
            sequences = [
                (past, [*own, *draft[:i]]) for past, own, draft, count in turns for i in range(count)
            ]
            edits = Edits(samplings, sequences, vocab=vocab, device=device)
        self.sampler = TokenSampler(samplings, device, edits)
        noise = Noise([row.work.seed for row in self.owners], [row.work.trajectory_id for row in self.owners])
        lengths = [row.completion_length + i for row, _, count in rows for i in range(count)]
        self._uniforms = torch.from_numpy(noise.uniforms(lengths, 1)[:, 0]).to(device)

    def sample(self, logits: Tensor) -> SampledTokens:
        """The next token of each position."""
        return self.sampler(logits, self._uniforms)

    def kept(self, sampled: Sequence[int]) -> list[int]:
        """Of each row how many of the sampled tokens stand, if none of them ends it."""
        counts = []
        for start, draft in zip(self.starts, self.drafts, strict=False):
            right = 0
            while right < len(draft) and sampled[start + right] == draft[right]:
                right += 1
            counts.append(right + 1)
        return counts
