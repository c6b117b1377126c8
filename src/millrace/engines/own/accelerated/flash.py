"""Attention over cached keys and values in one call for all slots, on GPUs: torch's flash attention. Where
scores have caps or sinks, which torch's kernel lacks, it is the operator `attended` of `fused`.

The kernel reads the length of each slot on the device. So the kernel computes over no masked key. To the host
a decode step is the same whatever the lengths: the step is recorded once (`recorded`) and replayed.

Shape suffixes: M rows (tokens), R segments, T tiles, H query heads, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from millrace.devices.gpu import recorded, recording_pool
from millrace.devices.operators import OPERATORS
from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.attention import BUCKET, Kernel, Segment
from millrace.engines.own.cache import KVCache
from millrace.engines.own.forward import ForwardPass
from millrace.engines.own.parameters import Parameters

Tensor = torch.Tensor

PADDED = RowMatmul(8)
"""The padding of rows, so that few numbers of rows are recorded."""
TILE_ROWS = 8
"""Rows of a slot whose queries read the keys of a kv head together."""


class FlashCache(KVCache):
    """Keys and values (layers, slots, positions, kv_heads, head_dim), given the shape of a `KVCache`."""

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, self.num_slots, kv_heads, self.num_positions, head_dim = shape
        flat = (layers, self.num_slots, self.num_positions, kv_heads, head_dim)
        self.keys, self.values = (torch.zeros(flat, dtype=dtype, device=device) for _ in range(2))
        self.lengths, self.kept = [], {}

    def numbers(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, slot, :length], self.values[:, slot, :length]


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the operator `attended` reads beside queries and cache.

    used_M    int32, tokens that each row sees of its slot, its own included
    counts    int32, zeros in which programs of the kernel count: as many as tiles and kv heads
    tiles_T3  int64, the first row of each tile, its rows, which follow each other, and their slot. None: a
              decode step, whose rows are those of the first slots
    """

    used_M: Tensor
    counts: Tensor
    tiles_T3: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Consecutive positions of several slots, packed one segment after another. In a decode step a segment is
    one position.

    query_ends  (R + 1,) int32, of segments among the rows; begins with 0
    key_starts  (R + 1,) int32, of slots among all tokens of the cache; the last is not read
    used_R      int32, tokens of the slot that the segment sees, its own included
    rows_M      int64, the places of the rows' tokens among all tokens of the cache
    tiled       of a decode step of the first slots, and where caps or sinks need it
    """

    cache: FlashCache
    kernel: Kernel
    query_ends: Tensor
    key_starts: Tensor
    used_R: Tensor
    rows_M: Tensor
    longest_query: int
    longest_key: int
    tiled: Tiles | None = None

    def __call__(
        self, layer: int, q_MHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_MHD: Tensor, sinks_H: Tensor | None
    ) -> None:
        count = len(self.rows_M)
        keys, values = self.memory(layer)
        keys.index_copy_(0, self.rows_M, k_MKD[:count])
        values.index_copy_(0, self.rows_M, v_MKD[:count])
        out_MHD[:count] = self.attended(layer, q_MHD[:count], sinks_H)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (tokens of the cache, K, D) each."""
        return self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)

    def attended(self, layer: int, q_MHD: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Over keys and values that are in the cache."""
        if not self.kernel.plain:
            return self.by_tiles(layer, q_MHD.contiguous(), sinks_H)
        window = self.kernel.windows[layer]
        return flash_attention(q_MHD, *self.memory(layer), self, window=window)

    def by_tiles(self, layer: int, q_MHD: Tensor, sinks_H: Tensor | None) -> Tensor:
        """The same, by the operator `attended`."""
        assert self.tiled is not None, self.kernel
        tiled, kernel, cache = self.tiled, self.kernel, self.cache
        tensors = (q_MHD, cache.keys[layer], cache.values[layer], sinks_H, tiled.used_M, tiled.counts)
        scores = (kernel.scale, kernel.cap, kernel.windows[layer])
        out: Tensor = OPERATORS.attended(*tensors, tiled.tiles_T3, *scores)
        return out


def flash_attention(
    q_MHD: Tensor, keys: Tensor, values: Tensor, where: FlashAttention, *, window: int | None
) -> Tensor:
    """(M, H, D). The mask is causal, aligned at the end of a slot's tokens. The documented interface of torch
    2.11 lacks `seqused_k`; the operator below has `seqused_k` from 2.11 to 2.13."""
    ends = (where.query_ends, where.key_starts, where.longest_query, where.longest_key)
    dropout, causal, debug = 0.0, window is None, False
    left, right = (-1, -1) if window is None else (window - 1, 0)
    operator: Any = torch.ops.aten._flash_attention_forward
    out: Tensor = operator(
        *(q_MHD, keys, values, *ends, dropout, causal, debug),
        scale=where.kernel.scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=where.used_R,
    )[0]
    return out


def flash_prefill(cache: FlashCache, segments: Sequence[Segment], kernel: Kernel) -> FlashAttention:
    starts = [s.slot * cache.num_positions for s in segments]
    rows = [start + s.start + i for start, s in zip(starts, segments, strict=True) for i in range(s.count)]
    put = partial(torch.tensor, dtype=torch.int32, device=cache.keys.device)
    tiled = None
    if not kernel.plain:
        used = [s.start + i + 1 for s in segments for i in range(s.count)]
        tiles = tiles_of([(s.slot, s.count) for s in segments])
        counts = put([0] * (len(tiles) * cache.keys.shape[3]))
        tiled = Tiles(put(used), counts, put(tiles, dtype=torch.int64))
    return FlashAttention(
        cache,
        kernel,
        query_ends=put([0, *(s.count for s in segments)]).cumsum(0, dtype=torch.int32),
        key_starts=put([*starts, cache.num_slots * cache.num_positions]),
        used_R=put([s.start + s.count for s in segments]),
        rows_M=put(rows, dtype=torch.int64),
        longest_query=max(s.count for s in segments),
        longest_key=max(s.start + s.count for s in segments),
        tiled=tiled,
    )


def tiles_of(counts: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """`Tiles.tiles_T3` of slots and how many rows each has, one after another."""
    tiles, row = [], 0
    for slot, count in counts:
        starts = range(row, row + count, TILE_ROWS)
        tiles += [(start, min(TILE_ROWS, row + count - start), slot) for start in starts]
        row += count
    return tiles


class RecordedSteps:
    """Decode steps of the first slots, recorded at the first use of a number of rows and a set of weights.

    A recording reads and writes the same memory every time. So tokens and positions are put into that memory;
    the device derives everything else that changes from them.
    """

    def __init__(
        self, forward: ForwardPass, cache: FlashCache, kernel: Kernel, architecture: Architecture
    ) -> None:
        device, self._cache, self._kernel, self._forward = cache.keys.device, cache, kernel, forward
        slots = torch.arange(cache.num_slots + 1, device=device)
        self._starts = slots * cache.num_positions
        self._counts = torch.zeros(
            cache.num_slots * architecture.num_kv_heads, dtype=torch.int32, device=device
        )
        self._slots, self._key_starts = slots.int(), self._starts.int()
        self._tokens, self._positions = (torch.zeros_like(slots[1:]) for _ in range(2))
        self._logits = torch.zeros((cache.num_slots, architecture.vocab), device=device)
        self._recordings: dict[tuple[int, int], Callable[[], None]] = {}
        # Without grouped experts the host reads how many rows each gets; no recording can do that.
        self.is_recorded = forward.mixture.grouped or not architecture.routed
        self._pool = recording_pool(device) if self.is_recorded else None

    def place(self, tokens: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor, int]:
        """Put `tokens` and `positions` of the first slots into the memory that a step reads. Return that
        memory, padded to the rows of a recording, and how many tokens a batch may decode. A step writes into
        a padded slot behind its last valid position."""
        rows = min(PADDED.rows(len(tokens)), self._cache.num_slots)
        used, kept = self._cache.used, self._cache.kept
        lengths = [*self._cache.lengths, *(kept.get(slot, 0) for slot in range(used, rows))]
        self._tokens[:rows] = torch.tensor([*tokens, *[0] * (rows - len(tokens))])
        self._positions[:rows] = torch.tensor([*positions, *lengths[len(positions) : rows]])
        steps = min(BUCKET, self._cache.num_positions - max(positions))
        return self._tokens[:rows], self._positions[:rows], steps

    def logits(self, weights: Parameters, rows: int) -> Tensor:
        """(rows, V) float32, until the next step."""
        key = (id(weights), rows)
        if key not in self._recordings:
            self._recordings[key] = recorded(partial(self._step, weights, rows), self._pool)
        self._recordings[key]()
        return self._logits[:rows]

    def forget(self) -> None:
        """The memory of weights and cache is about to move: a recording would go on with the old memory."""
        self._recordings.clear()

    def _step(self, weights: Parameters, rows: int) -> None:
        positions = self._positions[:rows]
        used = (positions + 1).int()
        attention = FlashAttention(
            self._cache,
            self._kernel,
            query_ends=self._slots[: rows + 1],
            key_starts=self._key_starts[: rows + 1],
            used_R=used,
            rows_M=self._starts[:rows] + positions,
            longest_query=1,
            longest_key=self._cache.num_positions,
            tiled=Tiles(used, self._counts),
        )
        hidden = self._forward.hidden(weights, self._tokens[:rows], positions, attention)
        self._logits[:rows] = self._forward.logits(weights, hidden, rows)
