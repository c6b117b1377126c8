"""The engine with drafts. While few trajectories run, a pass verifies several tokens of each: of each row
its last token and the draft behind it.

Noise is a pure function of the position. So every position is sampled with its own noise, as decode steps
would do one after another. A draft token stands if it is the sampled one. The first sampled token that
differs ends the row's part of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from msgspec.structs import replace

from millrace.core.errors import ConfigError
from millrace.core.types import ReplicaLoad
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.attention import Segment
from millrace.engines.own.cache import KVCache
from millrace.engines.own.decode import DecodeBatch
from millrace.engines.own.drafts.drafter import PAYS, Drafter, Worth
from millrace.engines.own.drafts.earlier import EarlierCompletions
from millrace.engines.own.sampler import SampledTokens, TokenSampler
from millrace.engines.own.sampling_options import Edits, recorded_routing, routing_memory
from millrace.engines.own.torch_engine import TorchEngine
from millrace.rollout.continuation import Continuation
from millrace.rollout.noise import Noise
from millrace.rollout.protocol import EngineOptions

Tensor = torch.Tensor

PASS_ROWS_MAX = 128
"""Positions of a pass. Exactness is tried with so many rows of logits at least (`exact.LOGITS_MIN`)."""


class DraftingEngine(TorchEngine):
    """A `TorchEngine` with a `drafter`, by default that of `options.drafts`."""

    def __init__(
        self,
        architecture: Architecture,
        options: EngineOptions,
        *,
        eos_ids: Iterable[int],
        decode: Callable[[list[int]], str] | None,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(architecture, options, eos_ids=eos_ids, decode=decode)
        self._drafter = self._opened_drafter() if drafter is None else drafter
        self._worth = Worth(8.0, 16.0)
        self._drafted = self._accepted = 0
        self._rows_max = min(options.draft_rows_max, PASS_ROWS_MAX - 1)
        self._states: dict[int, torch.Tensor] = {}  # by trajectory, from which its last token was sampled
        if self._forward.routing is not None:
            rows = self._forward.matmul.rows(max(options.slots, PASS_ROWS_MAX))
            self._forward.routing = routing_memory(architecture, rows, self._device)

    def _opened_drafter(self) -> Drafter:
        if self._options.drafts == "earlier":
            return EarlierCompletions()
        raise ConfigError(f"`rollout.drafts` ({self._options.drafts!r}) has no drafter in this engine")

    def load(self) -> ReplicaLoad:
        return replace(super().load(), drafted_tokens=self._drafted, accepted_tokens=self._accepted)

    def swap(self, version: int) -> None:
        super().swap(version)
        self._forget_states()

    def sleep(self) -> None:
        super().sleep()
        self._forget_states()

    def _forget_states(self) -> None:
        self._states.clear()
        self._drafter.swap()

    # ------------------------------------------------------------ steps

    def _decode(self) -> None:
        if len(self._running) > self._rows_max:
            self._states = {}
            super()._decode()
            return
        slots = [slot for slot in range(len(self._running)) if self._ready(slot)]
        drafts = self._drafts(slots)
        if any(drafts) or (slots and self._lacks_states()):
            self._verify(slots, drafts)
            return
        rows, self._states = [self._running[slot] for slot in slots], {}
        super()._decode()
        for row in rows:
            state = self._states.get(row.work.trajectory_id)
            self._drafter.note(row, 1, (), None if state is None else state[None])

    def _drafts(self, slots: Sequence[int]) -> list[list[int]]:
        """A draft for each row that gets one."""
        wants = self._drafter.wants_hidden
        asked = [
            place
            for place, slot in enumerate(slots)
            if not wants or self._running[slot].work.trajectory_id in self._states
        ]
        drafts: list[list[int]] = [[] for _ in slots]
        if not self._worth.tries() or not asked:
            return drafts
        rows = [self._running[slots[place]] for place in asked]
        room = (PASS_ROWS_MAX - len(slots)) // len(rows)
        most = [min(self._options.draft_tokens, room, row.tokens_left - 1) for row in rows]
        hidden = torch.stack([self._states[row.work.trajectory_id] for row in rows]) if wants else None
        for place, limit, draft in zip(asked, most, self._drafter.propose(rows, most, hidden), strict=True):
            drafts[place] = draft[: max(0, limit)]
        return drafts

    def _lacks_states(self) -> bool:
        """Recorded steps give no hidden states, so a pass without drafts has to."""
        return self._recorded is not None and self._drafter.wants_hidden and self._worth.share >= PAYS

    def _verify(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        batch = Verification(
            self._running, slots, drafts, self._cache, pad=self._forward.matmul.rows, vocab=self._vocab
        )
        attention = self._prefill_attention(batch.segments)
        hidden = self._hidden(self._active, batch.tokens, batch.positions, attention)
        logits = self._forward.logits(self._active, hidden, batch.count)
        sums = logits.sum(dim=-1)
        sampled = batch.sample(logits)
        read = torch.stack([x.double() for x in (sampled.tokens, sampled.logprobs, sums)]).tolist()
        tokens = [int(token) for token in read[0]]
        kept = batch.kept(tokens)
        stand = [start + i for start, count in zip(batch.starts, kept, strict=False) for i in range(count)]
        self._refuse_non_finite([batch.owners[i] for i in stand], [read[2][i] for i in stand])
        more = batch.sampler.top_logprobs(sampled), batch.sampler.token_masks(sampled)
        routing = recorded_routing(self._forward.routing, batch.owners, range(batch.count))
        columns = list(zip(tokens, read[1], *more, routing, strict=True))
        self._batch, self._states = None, {}
        for slot, row, start, count, draft in zip(
            slots, batch.continuations, batch.starts, kept, drafts, strict=False
        ):
            count = self._append(slot, row, columns[start : start + count])
            right = sum(map(int.__eq__, row.tokens[-count:], draft))
            self._drafted, self._accepted = self._drafted + len(draft), self._accepted + right
            self._worth.note(right, len(draft))
            states = hidden[start : start + count] if self._drafter.wants_hidden else None
            self._drafter.note(row, count, draft, states)
            if states is not None:
                self._states[row.work.trajectory_id] = states[-1].clone()
        self._steps_since_swap += 1
        self._retire(slots)

    def _append(self, slot: int, row: Continuation, columns: Sequence[tuple[Any, ...]]) -> int:
        """Append sampled tokens until one of them ends the row. Returns how many."""
        count = 0
        for token, logprob, *more in columns:
            self._cache.extend(slot, 1)
            row.append(token, logprob, self.version, *more)
            count += 1
            if row.finish is not None:
                break
        self._generated += count
        return count

    # ------------------------------------------------------------ hooks of the other steps

    def _logits(self, batch: DecodeBatch) -> torch.Tensor:
        few = len(self._running) <= self._rows_max
        if not (few and self._drafter.wants_hidden) or self._recorded is not None:
            return super()._logits(batch)
        hidden = self._hidden(self._active, batch.tokens, batch.positions, batch.attention)
        ids = [row.work.trajectory_id for row in batch.continuations]
        self._states = dict(zip(ids, hidden[batch.slots], strict=True))
        return self._forward.logits(self._active, hidden, batch.count)

    def _vacate(self, slot: int) -> Continuation:
        row = super()._vacate(slot)
        if row.finish is not None:
            self._drafter.finish(row)
        return row


# ---------------------------------------------------------------- verification


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
