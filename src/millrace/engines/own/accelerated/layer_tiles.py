"""The kernels of `fused` in Triton. Numbers are rounded where the operations of `ForwardPass` round them.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, W the rotated part of it, T tokens of the
cache, S slots, P positions, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millrace.engines.own import forward

Tensor = torch.Tensor


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    qkv,
    q_norm,
    k_norm,
    cos,
    signed_sin,
    places,
    q,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    FROM_ONE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head of one row. A key's program writes the value of the same head, too."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dtype = qkv.dtype.element_ty
    columns = tl.arange(0, TILE)
    inside = columns < DIM
    turned = columns < WIDTH
    partners = columns ^ 1 if NEIGHBOURS else (columns + WIDTH // 2) % WIDTH
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partners, mask=turned, other=0.0).to(tl.float32)
    if NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / DIM + eps)
        norm = q_norm
        if head >= HEADS:
            norm = k_norm
        x = _normed(x, scale, tl.load(norm + columns, mask=inside, other=0.0), dtype, FROM_ONE)
        other = _normed(other, scale, tl.load(norm + partners, mask=turned, other=0.0), dtype, FROM_ONE)
    c = tl.load(cos + row * WIDTH + columns, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(signed_sin + row * WIDTH + columns, mask=turned, other=0.0).to(tl.float32)
    x = tl.where(turned, (x * c).to(dtype).to(tl.float32) + other * s, x).to(dtype)
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * DIM + columns, x, mask=inside)
    else:
        place = (tl.load(places + row) * KV_HEADS + head - HEADS) * DIM + columns
        tl.store(keys + place, x, mask=inside)
        value = tl.load(source + KV_HEADS * DIM + columns, mask=inside)
        tl.store(values + place, value, mask=inside)


@triton.jit
def _normed(x, scale, weight, dtype: tl.constexpr, FROM_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    weight = weight.to(tl.float32)
    x = (x * scale).to(dtype).to(tl.float32)
    if FROM_ONE:
        x += x * weight
    else:
        x *= weight
    return x.to(dtype).to(tl.float32)


def rotated(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos_MW: Tensor,
    signed_sin_MW: Tensor,
    places_M: Tensor,
    keys_TKD: Tensor,
    values_TKD: Tensor,
    eps: float,
    from_one: bool,
    neighbours: bool,
) -> Tensor:
    """As `fused.rotated`."""
    rows, (_, kv_heads, dim), width = len(places_M), keys_TKD.shape, cos_MW.shape[-1]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    tensors = (cos_MW, signed_sin_MW, places_M, qkv.new_empty((rows, heads, dim)), keys_TKD, values_TKD)
    assert all(x.is_contiguous() for x in (qkv, *tensors)), [x.stride() for x in (qkv, *tensors)]
    _rotated[rows, heads + kv_heads](
        *(qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm),
        *tensors,
        *(eps, heads, kv_heads, dim, width),
        *(q_norm is not None, from_one, neighbours, triton.next_power_of_2(dim)),
        num_warps=1,
    )
    return tensors[3]


@triton.jit
def _added(  # type: ignore[no-untyped-def]
    to,
    x,
    first,
    second,
    out,
    scale,
    eps,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    FROM_ONE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row of the residual stream."""
    dtype = to.dtype.element_ty
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + columns
    more = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        weight = tl.load(first + columns, mask=inside, other=0.0)
        more = _normed_row(more, weight, eps, dtype, WIDTH, FROM_ONE)
    total = (tl.load(to + row, mask=inside, other=0.0).to(tl.float32) + more * scale).to(dtype)
    tl.store(to + row, total, mask=inside)
    weight = tl.load(second + columns, mask=inside, other=0.0)
    normed = _normed_row(total.to(tl.float32), weight, eps, dtype, WIDTH, FROM_ONE)
    tl.store(out + row, normed.to(dtype), mask=inside)


@triton.jit
def _normed_row(  # type: ignore[no-untyped-def]
    x, weight, eps, dtype: tl.constexpr, WIDTH: tl.constexpr, FROM_ONE: tl.constexpr
):
    """A norm with a weight is one operation, unless the weight counts from one."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    if FROM_ONE:
        return _normed(x, scale, weight, dtype, FROM_ONE)
    return (x * scale * weight.to(tl.float32)).to(dtype).to(tl.float32)


def added(
    to: Tensor, x: Tensor, first: Tensor | None, second: Tensor, scale: float, eps: float, from_one: bool
) -> Tensor:
    """As `fused.added`."""
    assert to.is_contiguous() and x.is_contiguous() and to.shape == x.shape, (to.stride(), x.stride())
    out = torch.empty_like(to)
    (rows, width), tile = to.shape, triton.next_power_of_2(to.shape[1])
    _added[(rows,)](
        *(to, x, to if first is None else first, second, out, scale, eps),
        *(width, first is not None, from_one, tile),
        num_warps=min(16, max(1, tile // 512)),
    )
    return out


PROGRAMS, LONG = 264, 8192
"""So many programs of attention are started at least, two for each processor of an H100: with few rows
several share the keys of one. With many rows only more than `LONG` keys are shared."""


@triton.jit
def _attended(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    used,
    counts,
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
    TILE_G: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """The queries of one kv head of one row, over one split of its keys. Of the splits that have keys, the
    last program to end adds them up."""
    row = tl.program_id(0).to(tl.int64)
    head, split = tl.program_id(1), tl.program_id(2)
    stop = tl.load(used + row)
    start = tl.maximum(stop - window, 0)
    share = tl.cdiv(tl.maximum(tl.cdiv(stop - start, SPLITS), share_min), TILE_P) * TILE_P
    splits = tl.cdiv(stop - start, share)
    if split < splits:
        start += split * share
        stop = tl.minimum(start + share, stop)
        g, d = tl.arange(0, TILE_G), tl.arange(0, TILE_D)
        place = row * KV_HEADS + head
        of_query = (place * GROUP + g[:, None]) * DIM + d[None, :]
        inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
        queries = tl.load(q + of_query, mask=inside, other=0.0)
        memory = (row * positions * KV_HEADS + head) * DIM
        highest = tl.full((TILE_G,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_G,), tl.float32)
        found = tl.zeros((TILE_G, TILE_D), tl.float32)
        for first in range(start, stop, TILE_P):
            p = first + tl.arange(0, TILE_P)
            at = memory + p.to(tl.int64) * (KV_HEADS * DIM)
            there = (p < stop)[None, :] & (d < DIM)[:, None]
            k = tl.load(keys + at[None, :] + d[:, None], mask=there, other=0.0)
            scores = tl.dot(queries, k, input_precision="ieee") * scale
            scores = tl.where((p < stop)[None, :], scores, float("-inf"))
            top = tl.maximum(highest, tl.max(scores, axis=1))
            shrink = tl.exp(highest - top)
            weights = tl.exp(scores - top[:, None])
            there = (p < stop)[:, None] & (d < DIM)[None, :]
            v = tl.load(values + at[:, None] + d[None, :], mask=there, other=0.0)
            total = total * shrink + tl.sum(weights, axis=1)
            found = tl.dot(weights.to(v.dtype), v, found * shrink[:, None], input_precision="ieee")
            highest = top
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
                found, total = _added_up(parts, sums, place * SPLITS, splits, TILE_G, TILE_D)
        if ends:
            tl.store(out + of_query, (found / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _added_up(  # type: ignore[no-untyped-def]
    parts, sums, first, splits, TILE_G: tl.constexpr, TILE_D: tl.constexpr
):
    """What other processors have just stored is not read from this one's cache."""
    g = tl.arange(0, TILE_G)
    of_part = g[:, None] * TILE_D + tl.arange(0, TILE_D)[None, :]
    highest = tl.full((TILE_G,), float("-inf"), tl.float32)
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
    return found, total


def attended(
    q_MHD: Tensor,
    keys_SPKD: Tensor,
    values_SPKD: Tensor,
    used_M: Tensor,
    counts: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """As `fused.attended`. The queries of a kv head read its keys once, together."""
    (rows, heads, dim), (_, positions, kv_heads, _) = q_MHD.shape, keys_SPKD.shape
    tensors = (q_MHD, keys_SPKD, values_SPKD, used_M, counts)
    assert all(x.is_contiguous() for x in tensors), [x.stride() for x in tensors]
    group = heads // kv_heads
    tile_g, tile_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(dim))
    tile_p = max(16, 8192 // tile_d)
    splits, share_min = shares(rows * kv_heads, positions, tile_p)
    parts = q_MHD.new_empty((rows * kv_heads * splits, tile_g, tile_d), dtype=torch.float32)
    sums = q_MHD.new_empty((rows * kv_heads * splits, 2, tile_g), dtype=torch.float32)
    out = torch.empty_like(q_MHD)
    _attended[rows, kv_heads, splits](
        *(*tensors, parts, sums, out, scale, positions, positions if window is None else window, share_min),
        *(kv_heads, group, dim, splits, tile_g, tile_d, tile_p),
        num_stages=2,
    )
    return out


def shares(programs: int, positions: int, tile: int) -> tuple[int, int]:
    """Splits of the keys at most, a power of two, and how many keys each has at least."""
    few = PROGRAMS // programs
    splits = min(max(1, few, positions // LONG), max(1, positions // (2 * tile)), 32)
    return 1 << (splits.bit_length() - 1), 2 * tile if few > 1 else LONG


@triton.jit
def _gated_linear(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    inputs,
    outputs,
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """A tile of gates and the same tile of ups. Programs with the same weights follow each other."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    o = tl.program_id(1) * TILE_O + tl.arange(0, TILE_O)
    i = tl.arange(0, TILE_I)
    x += m[:, None] * inputs + i[None, :]
    gates = weight + o[None, :].to(tl.int64) * inputs + i[:, None]
    ups = gates + outputs.to(tl.int64) * inputs
    gate = tl.zeros((TILE_M, TILE_O), tl.float32)
    up = tl.zeros((TILE_M, TILE_O), tl.float32)
    for start in range(0, inputs, TILE_I):
        inside = i < inputs - start
        of_weights = inside[:, None] & (o < outputs)[None, :]
        some = tl.load(x, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        gate = tl.dot(some, tl.load(gates, mask=of_weights, other=0.0), gate, input_precision="ieee")
        up = tl.dot(some, tl.load(ups, mask=of_weights, other=0.0), up, input_precision="ieee")
        x += TILE_I
        gates += TILE_I
        ups += TILE_I
    if BIASED:
        gate += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + outputs + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    gate = _activated(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    found = (gate * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(
        out + m[:, None] * outputs + o[None, :], found, mask=(m < rows)[:, None] & (o < outputs)[None, :]
    )


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # tanh(y) = 2 sigmoid(2 y) - 1
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


def gated_linear(x_MI: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """As `fused.gated_linear`."""
    (rows, inputs), outputs = x_MI.shape, len(weight) // 2
    assert x_MI.is_contiguous() and weight.is_contiguous(), (x_MI.stride(), weight.stride())
    out = x_MI.new_empty((rows, outputs))
    tile_m, tile_o, tile_i = tiles(rows, outputs)
    _gated_linear[triton.cdiv(rows, tile_m), triton.cdiv(outputs, tile_o)](
        *(x_MI, weight, x_MI if bias is None else bias, out, rows, inputs, outputs),
        *(bias is not None, activation, tile_m, tile_o, tile_i),
        num_stages=4,
    )
    return out


def tiles(rows: int, outputs: int) -> tuple[int, int, int]:
    """Rows, outputs and inputs of a tile. Few rows wait for the weights' memory: then many small programs
    read them. A program of more rows computes more with what it has read."""
    tile_m = min(64, max(16, triton.next_power_of_2(rows)))
    tile_o = 16 if tile_m <= 32 and outputs < 8192 else 32
    return tile_m, tile_o, 128 if tile_m <= 32 else 64


@triton.jit
def _chosen(  # type: ignore[no-untyped-def]
    logits,
    shares,
    experts,
    count,
    ROUTED: tl.constexpr,
    SUM_1: tl.constexpr,
    TILE: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """The experts of one row, one after another. Of equal ones the first is taken. A maximum passes over what
    is no number, a sum does not."""
    row = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, TILE), tl.arange(0, TILE_R)
    x = tl.load(logits + row * count + columns, mask=columns < count, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, axis=0))
    total = tl.sum(x, axis=0)
    probs = tl.where(columns < count, x / total, -1.0)
    share = tl.zeros((TILE_R,), tl.float32)
    expert = tl.zeros((TILE_R,), tl.int32)
    for place in range(ROUTED):
        best = tl.max(probs, axis=0)
        column = tl.min(tl.where(probs == best, columns, count - 1), axis=0)
        share = tl.where(places == place, best, share)
        expert = tl.where(places == place, column, expert)
        probs = tl.where(columns == column, -1.0, probs)
    if SUM_1:
        share = share / tl.sum(share, axis=0)
    share = tl.where(total == total, share, total)
    tl.store(shares + row * ROUTED + places, share, mask=places < ROUTED)
    tl.store(experts + row * ROUTED + places, expert, mask=places < ROUTED)


def chosen(logits: Tensor, count: int, sum_1: bool) -> tuple[Tensor, Tensor]:
    """As `forward.chosen`."""
    assert logits.is_contiguous(), logits.stride()
    rows, num_experts = logits.shape
    shares = logits.new_empty((rows, count), dtype=torch.float32)
    experts = torch.empty_like(shares, dtype=torch.int64)
    tiles = triton.next_power_of_2(num_experts), triton.next_power_of_2(count)
    _chosen[(rows,)](logits, shares, experts, num_experts, count, sum_1, *tiles, num_warps=1)
    return shares, experts


PAIRS_MAX = 8192
"""Each pair is compared with each other one."""


@triton.jit
def _by_expert(  # type: ignore[no-untyped-def]
    experts, rows, sorted_experts, places, ends, pairs, count, ROUTED: tl.constexpr, TILE: tl.constexpr
):
    """Counts, for a tile of pairs of a row and an expert, the pairs before each; and for a tile of experts,
    the pairs up to its own."""
    mine = tl.program_id(0) * TILE + tl.arange(0, TILE)
    expert = tl.load(experts + mine, mask=mine < pairs, other=0)
    place = tl.zeros((TILE,), tl.int32)
    end = tl.zeros((TILE,), tl.int32)
    for start in range(0, pairs, TILE):
        others = start + tl.arange(0, TILE)
        their = tl.load(experts + others, mask=others < pairs, other=count)[None, :]
        earlier = (their == expert[:, None]) & (others[None, :] < mine[:, None])
        place += tl.sum(((their < expert[:, None]) | earlier).to(tl.int32), axis=1)
        end += tl.sum((their <= mine[:, None]).to(tl.int32), axis=1)
    there = mine < pairs
    tl.store(places + mine, place, mask=there)
    tl.store(rows + place, mine // ROUTED, mask=there)
    tl.store(sorted_experts + place, expert, mask=there)
    tl.store(ends + mine, end, mask=mine < count)


def by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `forward.by_expert`, which computes it for very many."""
    pairs, tile = experts.numel(), 64
    if pairs > PAIRS_MAX:
        return forward.by_expert(experts, count)
    assert experts.is_contiguous(), experts.stride()
    rows, sorted_experts, places = (experts.new_empty(pairs) for _ in range(3))
    ends = experts.new_empty(count, dtype=torch.int32)
    grid = (triton.cdiv(max(pairs, count), tile),)
    _by_expert[grid](experts, rows, sorted_experts, places, ends, pairs, count, experts.shape[1], tile)
    return rows, sorted_experts, places, ends
