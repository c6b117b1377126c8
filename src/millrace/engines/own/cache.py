"""The cache of keys and values: each running trajectory has one slot, and the slots in use form a prefix. In
the other slots keys and values stay between two turns of a trajectory.

A decode step computes over slots [0, used) without gathering. So the last slot in use fills a released slot
at once. Keys and values belong to the weights that computed them; `forget` empties a slot.

What is kept costs no running trajectory its slot. If the next one to run finds only slots with kept
sequences, the trajectory that is expected back latest loses its own. Those that are back and wait for a slot
lose theirs after all others, the last of the queue first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from millrace.core.turns.gaps import Gaps
from millrace.core.types import Finish
from millrace.rollout.continuation import Continuation

Tensor = torch.Tensor


class KVCache:
    """Values (layers, slots, kv_heads, positions, head_dim), and keys with the last two dimensions
    exchanged, so that both matmuls of attention run along memory.

    `shape` is the shape of the values. The cache knows how many positions of each slot are valid (`lengths`);
    the cache never looks at tokens.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        *outer, self.num_positions, head_dim = shape
        self.keys = torch.zeros((*outer, head_dim, self.num_positions), dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.num_slots = shape[1]
        self.lengths: list[int] = []
        self.kept: dict[int, int] = {}  # slots behind the used ones: positions that stay valid

    @property
    def used(self) -> int:
        return len(self.lengths)

    @property
    def can_allocate(self) -> bool:
        return self.used < self.num_slots

    def allocate(self) -> int:
        assert self.can_allocate, (self.used, self.num_slots)
        self.lengths.append(0)
        return self.used - 1

    def release(self, slot: int) -> int:
        """Free `slot` and move the last used slot into it. Returns the slot that was moved."""
        assert 0 <= slot < self.used, (slot, self.used)
        last = self.used - 1
        if last != slot:
            self.lengths[slot] = 0
            self.copy(last, slot, self.lengths[last])
        self.lengths.pop()
        return last

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of `source` to `target`."""
        assert self.lengths[target] == 0 and length <= self.lengths[source], (source, target, length)
        for there, here in zip(self.numbers(target, length), self.numbers(source, length), strict=True):
            there.copy_(here)
        self.lengths[target] = length

    def numbers(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` positions of `slot`, not copied."""
        return self.keys[:, slot, ..., :length], self.values[:, slot, :, :length]

    def extend(self, slot: int, count: int) -> None:
        """Declare `count` more positions of `slot` valid."""
        self.lengths[slot] += count
        assert self.lengths[slot] <= self.num_positions, (slot, self.lengths[slot], self.num_positions)

    def forget(self, slot: int) -> None:
        """Forget every position of `slot`, because the weights changed. The slot stays allocated."""
        self.lengths[slot] = 0


# ---------------------------------------------------------------- kept sequences


@dataclass(frozen=True, slots=True)
class _Kept:
    trajectory_id: int
    tokens: list[int]  # those whose keys and values are kept


class KeptSequences:
    """Gives out and takes back the slots of `cache`.

    Args:
        keeps: False: nothing is kept.
        now: a clock, in seconds.
    Attributes:
        reused_tokens   positions that were not computed again
        evicted_tokens  positions whose keys and values had to make room
    """

    def __init__(self, cache: KVCache, *, keeps: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._cache, self._keeps, self._now = cache, keeps, now
        self._sequences: dict[int, _Kept] = {}  # by slot
        self._gaps = Gaps()
        self.reused_tokens = self.evicted_tokens = 0

    def allocate(self, waiting: Sequence[Continuation]) -> int:
        """The next slot, for the first of `waiting`, with as many positions as were kept of it."""
        slot, entering = self._cache.used, waiting[0]
        own = self._slot_of(entering.work.trajectory_id)
        place = self._room(waiting) if own is None else own
        if place != slot:
            self._exchange(place, slot)
        kept = self._put(slot, None)
        self._cache.allocate()
        self._gaps.come_back(entering.work.trajectory_id, self._now())
        if kept is None:
            return slot
        count = len(kept.tokens)
        if own is not None and entering.tokens[:count] == kept.tokens and len(entering.tokens) > count:
            self._cache.extend(slot, count)
            self.reused_tokens += count
        else:
            self.evicted_tokens += count
        return slot

    def release(self, slot: int, continuation: Continuation) -> int:
        """Free `slot` and move the last used slot into it. Returns the slot that was moved. A turn that has
        ended by itself may be answered, so its keys and values stay."""
        stale = len(continuation.prefix_key) == 1  # went on with keys and values of an earlier version
        if not self._keeps or stale or continuation.finish is not Finish.STOP:
            return self._cache.release(slot)
        last, lengths = self._cache.used - 1, self._cache.lengths
        if last != slot:
            self._swap_numbers(slot, last, max(lengths[slot], lengths[last]))
            lengths[slot], lengths[last] = lengths[last], lengths[slot]
        tokens = continuation.tokens[: lengths.pop()]
        self._put(last, _Kept(continuation.work.trajectory_id, tokens))
        self._gaps.leave(continuation.work.trajectory_id, self._now())
        return last

    def counts(self) -> dict[str, int]:
        """Of a `ReplicaLoad`."""
        return {"reused_tokens": self.reused_tokens, "evicted_tokens": self.evicted_tokens}

    def forget(self) -> None:
        """Drop everything, because the weights changed or the memory is given back."""
        self._sequences.clear()
        self._cache.kept.clear()

    def _room(self, waiting: Sequence[Continuation]) -> int:
        """An unused slot that keeps nothing, or whose sequence has to go."""
        unused = range(self._cache.used, self._cache.num_slots)
        free = next((slot for slot in unused if slot not in self._sequences), None)
        return max(unused, key=self._away(waiting)) if free is None else free

    def _away(self, waiting: Sequence[Continuation]) -> Callable[[int], tuple[bool, float]]:
        """By slot, how far from its next turn the trajectory is."""
        queue = {continuation.work.trajectory_id: place for place, continuation in enumerate(waiting)}
        now_s = self._now()

        def away(slot: int) -> tuple[bool, float]:
            trajectory_id = self._sequences[slot].trajectory_id
            place = queue.get(trajectory_id)
            return place is None, self._gaps.left_s(trajectory_id, now_s) if place is None else place

        return away

    def _slot_of(self, trajectory_id: int) -> int | None:
        for slot, kept in self._sequences.items():
            if kept.trajectory_id == trajectory_id:
                return slot
        return None

    def _put(self, slot: int, kept: _Kept | None) -> _Kept | None:
        """Note what `slot` keeps. Returns what it kept before."""
        before = self._sequences.pop(slot, None)
        self._cache.kept.pop(slot, None)
        if kept is not None:
            self._sequences[slot], self._cache.kept[slot] = kept, len(kept.tokens)
        return before

    def _exchange(self, place: int, slot: int) -> None:
        moved, other = self._put(place, None), self._put(slot, None)
        self._swap_numbers(place, slot, max(len(kept.tokens) for kept in (moved, other) if kept is not None))
        self._put(place, other)
        self._put(slot, moved)

    def _swap_numbers(self, one: int, other: int, length: int) -> None:
        for here, there in zip(
            self._cache.numbers(one, length), self._cache.numbers(other, length), strict=True
        ):
            saved = here.clone()
            here.copy_(there)
            there.copy_(saved)
