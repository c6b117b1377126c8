"""Where keys and values of running trajectories are kept: one slot each, slots in use form a prefix.

A decode step computes over slots [0, used) without gathering, so a released slot is filled at once
with the last one. What a slot holds belongs to the weights that computed it; `forget` empties it.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class KVCache:
    """Values (layers, slots, kv_heads, positions, head_dim), and keys with the last two dimensions
    exchanged: so both products of attention run along memory.

    `shape` is that of the values. The cache knows how many positions of each slot are valid
    (`lengths`); it never looks at tokens.
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

    @property
    def used(self) -> int:
        return len(self.lengths)

    @property
    def can_allocate(self) -> bool:
        return self.used < self.num_slots

    @property
    def used_tokens(self) -> int:
        return sum(self.lengths)

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
        """Make the first `length` positions of `target` those of `source`."""
        assert self.lengths[target] == 0 and length <= self.lengths[source], (source, target, length)
        self._copy_numbers(source, target, length)
        self.lengths[target] = length

    def _copy_numbers(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, ..., :length] = self.keys[:, source, ..., :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def extend(self, slot: int, count: int) -> None:
        """Declare `count` more positions of `slot` valid."""
        self.lengths[slot] += count
        assert self.lengths[slot] <= self.num_positions, (slot, self.lengths[slot], self.num_positions)

    def forget(self, slot: int) -> None:
        """Forget every position of `slot`: the weights changed. It stays allocated."""
        self.lengths[slot] = 0
