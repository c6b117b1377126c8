"""The cache of keys and values: each running trajectory has one slot, and the slots in use form a prefix.

A decode step computes over slots [0, used) without gathering. So the last slot in use fills a released slot
at once. Keys and values belong to the weights that computed them; `forget` empties a slot.
"""

from __future__ import annotations

import torch

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
