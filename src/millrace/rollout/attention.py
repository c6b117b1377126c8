"""Attention over cached keys and values: one kernel for decoding and for prefill.

Prefill attends one query position at a time exactly as decoding does: the same product shapes, only
with more of them in a batch, all reading the same cached keys through a zero stride. Keys are padded
to a multiple of `BUCKET`; masked ones contribute exact zeros. With `exact`, keys are padded to a multiple of
`BLOCK`, and the weighted sum over values runs block by block, because matrix kernels split longer sums by
their length. Then a position's output depends on its own sequence only, bit for bit, and not on whether it
was prefilled or decoded, in which chunk, or with which neighbours.

Shape suffixes: M rows (tokens), N slots, H query heads, K kv heads, G = H / K, D head_dim, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millrace.rollout.cache import KVCache

Tensor = torch.Tensor

BLOCK = 64
BUCKET = 32  # of 16, 32 and 64 the fastest


def attend(
    q_BGD: Tensor, k_BDL: Tensor, v_BLD: Tensor, bias_B1L: Tensor, *, block: int | None = None
) -> Tensor:
    """softmax(q k / sqrt(D) + bias) v for B independent queries; the sum in blocks of `block` keys."""
    scale = q_BGD.shape[2] ** -0.5
    scores = torch.baddbmm(bias_B1L, q_BGD, k_BDL, alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v_BLD.dtype)
    if block is None:
        return torch.bmm(weights, v_BLD)
    out = torch.bmm(weights[..., :block], v_BLD[:, :block])
    for start in range(block, v_BLD.shape[1], block):
        stop = start + block
        out.baddbmm_(weights[..., start:stop], v_BLD[:, start:stop])
    return out


def mask_bias(positions: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """(positions, 1, L): 0 where key <= position, -inf after it."""
    keys = torch.arange(num_keys, device=positions.device)
    bias = torch.zeros((len(positions), 1, num_keys), dtype=dtype, device=positions.device)
    return bias.masked_fill_(keys > positions[:, None, None], float("-inf"))


def bucketed(length: int, *, exact: bool) -> int:
    """The number of keys to compute over for a sequence of `length`."""
    bucket = BLOCK if exact else BUCKET
    return -(-length // bucket) * bucket


class DecodeAttention:
    """One new token in each of the first N slots, at `positions`; `advance` moves all on by one.

    Where keys and values are written and what is masked is settled once, for all layers, and then
    only moved on, until the longest sequence leaves its bucket: `num_steps` tokens can be decoded.
    """

    def __init__(self, cache: KVCache, positions: Sequence[int], *, exact: bool = False) -> None:
        self._cache, self._count = cache, len(positions)
        self._block = BLOCK if exact else None
        device, (kv_heads, head_dim) = cache.values.device, (cache.values.shape[2], cache.values.shape[4])
        self._num_keys = bucketed(max(positions) + 1, exact=exact)
        self.num_steps = self._num_keys - max(positions)
        positions_N = torch.tensor(positions, device=device)
        rows = torch.arange(self._count * kv_heads, device=device)
        positions_R = positions_N.repeat_interleave(kv_heads)
        features = torch.arange(len(rows) * head_dim, device=device)
        self._value_index = rows * cache.num_positions + positions_R
        self._key_index = features * cache.num_positions + positions_R.repeat_interleave(head_dim)
        self._bias_index = rows * self._num_keys + positions_R
        self._bias = mask_bias(positions_R, self._num_keys, cache.values.dtype)

    def __call__(self, layer: int, q_MHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_MHD: Tensor) -> None:
        count, num_keys = self._count, self._num_keys
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        kv_heads, head_dim = k_MKD.shape[1:]
        keys.view(-1).put_(self._key_index, k_MKD[:count])
        values.view(-1, head_dim).index_copy_(0, self._value_index, v_MKD[:count].reshape(-1, head_dim))
        out = attend(
            q_MHD[:count].reshape(count * kv_heads, -1, head_dim),
            keys[:count].flatten(0, 1)[..., :num_keys],
            values[:count].flatten(0, 1)[:, :num_keys],
            self._bias,
            block=self._block,
        )
        out_MHD[:count] = out.view(count, -1, head_dim)

    def advance(self) -> None:
        self.num_steps -= 1
        if self.num_steps:
            self._value_index += 1
            self._key_index += 1
            self._bias_index += 1
            self._bias.view(-1).index_fill_(0, self._bias_index, 0.0)


@dataclass(frozen=True)
class Segment:
    """Positions [start, start + count) of the sequence in `slot`."""

    slot: int
    start: int
    count: int


class PrefillAttention:
    """Consecutive positions of several slots, packed one segment after another."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment], *, exact: bool = False) -> None:
        self._cache, self._plan = cache, []
        self._block = BLOCK if exact else None
        device, dtype, row = cache.keys.device, cache.keys.dtype, 0
        for segment in segments:
            stop = segment.start + segment.count
            num_keys = bucketed(stop, exact=exact)
            bias = mask_bias(torch.arange(segment.start, stop, device=device), num_keys, dtype)
            self._plan.append((segment, slice(row, row + segment.count), num_keys, bias))
            row += segment.count

    def __call__(self, layer: int, q_MHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_MHD: Tensor) -> None:
        kv_heads = k_MKD.shape[1]
        for segment, rows, num_keys, bias in self._plan:
            keys = self._cache.keys[layer, segment.slot]
            values = self._cache.values[layer, segment.slot]
            stop = segment.start + segment.count
            keys[..., segment.start : stop] = k_MKD[rows].permute(1, 2, 0)
            values[:, segment.start : stop] = v_MKD[rows].transpose(0, 1)
            for head, q_MGD in enumerate(q_MHD[rows].chunk(kv_heads, dim=1)):
                group = slice(head * q_MGD.shape[1], (head + 1) * q_MGD.shape[1])
                out_MHD[rows, group] = attend(
                    q_MGD,
                    keys[head, :, :num_keys].expand(segment.count, -1, -1),
                    values[head, :num_keys].expand(segment.count, -1, -1),
                    bias,
                    block=self._block,
                )
