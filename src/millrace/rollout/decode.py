"""What decode steps of the same sequences share: settled once, then only moved on by one token.

A `DecodeBatch` covers slots [0, count) and is good for as long as they hold the same sequences, each
has all but its last token computed, and the longest stays in its bucket of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from millrace.rollout.attention import DecodeAttention
from millrace.rollout.cache import KVCache
from millrace.rollout.noise import Noise
from millrace.rollout.sampler import Sampler
from millrace.rollout.sequence import Sequence

Tensor = torch.Tensor


class DecodeBatch:
    """The `ready` slots of `running`; those between them are computed and ignored: what they write
    lies beyond their valid positions.

    Attributes:
        sequences  of the ready slots, in their order
        tokens     (M,) the last token of each slot; M = `pad` of the number of slots
        positions  (M,) its position
        rows       the ready slots, or None if these are all of [0, count)
    """

    def __init__(
        self,
        running: Seq[Sequence],
        ready: Seq[int],
        cache: KVCache,
        *,
        pad: Callable[[int], int],
        exact: bool,
    ) -> None:
        self.slots, self.count = list(ready), ready[-1] + 1
        self.sequences = [running[slot] for slot in ready]
        works = [sequence.work for sequence in self.sequences]
        positions, padding = cache.lengths[: self.count], [0] * (pad(self.count) - self.count)
        device = cache.values.device
        self.attention = DecodeAttention(cache, positions, exact=exact)
        last = [sequence.tokens[-1] for sequence in running[: self.count]]
        self.tokens = torch.tensor(last + padding, device=device)
        self.positions = torch.tensor(positions + padding, device=device)
        self.rows = None if len(ready) == self.count else torch.tensor(self.slots, device=device)
        self._sampler = Sampler([work.sampling for work in works], device)
        noise = Noise([work.seed for work in works], [work.trajectory_id for work in works])
        lengths = [sequence.completion_length for sequence in self.sequences]
        self._uniforms = torch.from_numpy(noise.uniforms(lengths, self.attention.num_steps).T).to(device)

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each sequence and its log-prob. `logits`: of the ready slots."""
        return self._sampler(logits, self._uniforms[-self.attention.num_steps])

    def advance(self, tokens: Tensor) -> bool:
        """Go on to the next position with `tokens`, one for every slot; False if another batch must
        take over."""
        assert self.rows is None, self.slots
        self.attention.advance()
        self.tokens[: self.count] = tokens
        self.positions[: self.count] += 1
        return self.attention.num_steps > 0
