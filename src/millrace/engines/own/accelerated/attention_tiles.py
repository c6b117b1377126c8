"""Attention of a few rows of each slot in Triton: the operator `attended` of `fused`.

Shape suffixes: M rows, T tiles, H query heads, K kv heads, D head_dim, S slots, P positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millrace.engines.own.accelerated.flash import TILE_ROWS

Tensor = torch.Tensor

LOWEST = tl.constexpr(-1e30)
"""Below each score: the highest of a query that has seen no key yet."""
PROGRAMS, LONG = 264, 8192
"""So many programs of attention are started at least, two for each processor of an H100: with few rows
several share the keys of one. With many rows only more than `LONG` keys are shared."""


@triton.jit
def _attended(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    sinks,
    used,
    counts,
    tiles,
    parts,
    sums,
    out,
    scale,
    positions,
    window,
    share_min,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    TILE_G: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """The queries of one kv head of one tile, over one split of its keys. Of the splits that have keys, the
    last program to end adds them up."""
    tile = tl.program_id(0).to(tl.int64)
    head, split = tl.program_id(1), tl.program_id(2)
    row, slot, count = tile, tile, 1
    if ROWS > 1:
        row, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
        slot = tl.load(tiles + 3 * tile + 2)
    g, d = tl.arange(0, TILE_G), tl.arange(0, TILE_D)
    its_row = row + tl.minimum(g // GROUP, count - 1)
    its_head = head * GROUP + g % GROUP
    stops = tl.load(used + its_row)
    starts = tl.maximum(stops - window, 0)
    start, stop = tl.min(starts, axis=0), tl.max(stops, axis=0)
    share = tl.cdiv(tl.maximum(tl.cdiv(stop - start, SPLITS), share_min), TILE_P) * TILE_P
    splits = tl.cdiv(stop - start, share)
    if split < splits:
        start += split * share
        stop = tl.minimum(start + share, stop)
        place = tile * KV_HEADS + head
        of_query = (its_row * (KV_HEADS * GROUP) + its_head)[:, None] * DIM + d[None, :]
        inside = (g < count * GROUP)[:, None] & (d < DIM)[None, :]
        queries = tl.load(q + of_query, mask=inside, other=0.0)
        memory = (slot * positions * KV_HEADS + head) * DIM
        found, total, highest = _over_keys(
            queries, keys + memory, values + memory, starts, stops, start, stop, scale,
            KV_HEADS * DIM, DIM, CAP, TILE_G, TILE_D, TILE_P
        )  # fmt: skip
        ends = splits == 1
        if splits > 1:
            part = place * SPLITS + split
            of_part = g[:, None] * TILE_D + d[None, :]
            tl.store(parts + part * (TILE_G * TILE_D) + of_part, found)
            tl.store(sums + part * (2 * TILE_G) + g, highest)
            tl.store(sums + part * (2 * TILE_G) + TILE_G + g, total)
            tl.debug_barrier()  # all threads have stored before one of them counts
            ends = tl.atomic_add(counts + place, 1, sem="acq_rel") == splits - 1
            if ends:
                tl.store(counts + place, 0)
                found, total, highest = _added_up(parts, sums, place * SPLITS, splits, TILE_G, TILE_D)
        if ends:
            if SINKS:
                total += tl.exp(tl.load(sinks + its_head).to(tl.float32) - highest)
            tl.store(out + of_query, (found / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _over_keys(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    starts,
    stops,
    start,
    stop,
    scale,
    STEP: tl.constexpr,
    DIM: tl.constexpr,
    CAP: tl.constexpr,
    TILE_G: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """Sums over the keys from `start` to `stop`. Each query sees those from its `starts` to its `stops`."""
    d = tl.arange(0, TILE_D)
    highest = tl.full((TILE_G,), LOWEST, tl.float32)
    total = tl.zeros((TILE_G,), tl.float32)
    found = tl.zeros((TILE_G, TILE_D), tl.float32)
    for first in range(start, stop, TILE_P):
        p = first + tl.arange(0, TILE_P)
        at = p.to(tl.int64) * STEP
        there = (p < stop)[None, :] & (d < DIM)[:, None]
        k = tl.load(keys + at[None, :] + d[:, None], mask=there, other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee") * scale
        if CAP > 0.0:
            scores = CAP - 2.0 * CAP / (1.0 + tl.exp(scores * (2.0 / CAP)))  # CAP tanh(scores / CAP)
        seen = (p[None, :] < stops[:, None]) & (p[None, :] >= starts[:, None]) & (p < stop)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp(highest - top)
        weights = tl.exp(scores - top[:, None])
        there = (p < stop)[:, None] & (d < DIM)[None, :]
        v = tl.load(values + at[:, None] + d[None, :], mask=there, other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        found = tl.dot(weights.to(v.dtype), v, found * shrink[:, None], input_precision="ieee")
        highest = top
    return found, total, highest


@triton.jit
def _added_up(  # type: ignore[no-untyped-def]
    parts, sums, first, splits, TILE_G: tl.constexpr, TILE_D: tl.constexpr
):
    """What other processors have just stored is not read from this one's cache."""
    g = tl.arange(0, TILE_G)
    of_part = g[:, None] * TILE_D + tl.arange(0, TILE_D)[None, :]
    highest = tl.full((TILE_G,), LOWEST, tl.float32)
    total = tl.zeros((TILE_G,), tl.float32)
    found = tl.zeros((TILE_G, TILE_D), tl.float32)
    for part in range(first, first + splits):
        its_highest = tl.load(sums + part * (2 * TILE_G) + g, cache_modifier=".cg")
        its_total = tl.load(sums + part * (2 * TILE_G) + TILE_G + g, cache_modifier=".cg")
        its_part = tl.load(parts + part * (TILE_G * TILE_D) + of_part, cache_modifier=".cg")
        top = tl.maximum(highest, its_highest)
        shrink = tl.exp(highest - top)
        its_shrink = tl.exp(its_highest - top)
        total = total * shrink + its_total * its_shrink
        found = found * shrink[:, None] + its_part * its_shrink[:, None]
        highest = top
    return found, total, highest


def attended(
    q_MHD: Tensor,
    keys_SPKD: Tensor,
    values_SPKD: Tensor,
    sinks_H: Tensor | None,
    used_M: Tensor,
    counts: Tensor,
    tiles_T3: Tensor | None,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Tensor:
    """As `fused.attended`. The queries of a kv head and a tile read its keys once, together."""
    (rows, heads, dim), (_, positions, kv_heads, _) = q_MHD.shape, keys_SPKD.shape
    sinks, tiles = (q_MHD if sinks_H is None else sinks_H), (used_M if tiles_T3 is None else tiles_T3)
    tensors = (q_MHD, keys_SPKD, values_SPKD, sinks, used_M, counts, tiles)
    assert all(x.is_contiguous() for x in tensors), [x.stride() for x in tensors]
    num_tiles, rows_max = (rows, 1) if tiles_T3 is None else (len(tiles_T3), TILE_ROWS)
    group, programs = heads // kv_heads, num_tiles * kv_heads
    tile_g, tile_d = max(16, triton.next_power_of_2(rows_max * group)), max(16, triton.next_power_of_2(dim))
    tile_p = max(16, 8192 // tile_d)
    splits, share_min = shares(programs, positions, tile_p)
    parts = q_MHD.new_empty((programs * splits, tile_g, tile_d), dtype=torch.float32)
    sums = q_MHD.new_empty((programs * splits, 2, tile_g), dtype=torch.float32)
    out = torch.empty_like(q_MHD)
    _attended[num_tiles, kv_heads, splits](
        *(*tensors, parts, sums, out, scale, positions),
        *(positions if window is None else window, share_min, kv_heads, group, dim, splits),
        *(rows_max, cap or 0.0, sinks_H is not None, tile_g, tile_d, tile_p),
        num_warps=4 if tile_g < 64 else 8,
        num_stages=2,
    )
    return out


def shares(programs: int, positions: int, tile: int) -> tuple[int, int]:
    """Splits of the keys at most, a power of two, and how many keys each has at least."""
    few = PROGRAMS // programs
    splits = min(max(1, few, positions // LONG), max(1, positions // (2 * tile)), 32)
    return 1 << (splits.bit_length() - 1), 2 * tile if few > 1 else LONG
