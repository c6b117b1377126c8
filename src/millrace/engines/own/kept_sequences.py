"""Keys and values that stay between two turns of a trajectory, in slots that nothing runs in.

What is kept costs no running trajectory its slot. If the next one to run finds only slots with kept
sequences, the trajectory that is expected back latest loses its own. Those that are back and wait for a slot
lose theirs after all others, the last of the queue first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.core.turns.gaps import Gaps
from millrace.core.types import Finish
from millrace.engines.own.cache import KVCache
from millrace.rollout.continuation import Continuation


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
