"""The kernels of `fused` in Triton. Numbers are rounded where the operations of `ForwardPass` round them.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, W the rotated part of it, T tokens of the
cache, S slots, P positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from millrace.engines.own import mixture

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
    biases,
    places,
    experts,
    shares,
    scale,
    eps,
    WIDTH: tl.constexpr,
    ROUTED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    FROM_ONE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row of the residual stream. With experts `x` has the outputs of all pairs."""
    dtype = to.dtype.element_ty
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + columns
    if ROUTED == 0:
        more = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    else:
        more = tl.zeros((TILE,), tl.float32)
        for its in tl.static_range(ROUTED):
            pair = tl.program_id(0) * ROUTED + its
            output = x + tl.load(places + pair) * WIDTH + columns
            output = tl.load(output, mask=inside, other=0.0).to(tl.float32)
            if BIASED:
                bias = biases + tl.load(experts + pair) * WIDTH + columns
                output += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
                output = output.to(dtype).to(tl.float32)
            share = tl.load(shares + pair).to(dtype).to(tl.float32)
            more += (output * share).to(dtype).to(tl.float32)
        more = more.to(dtype).to(tl.float32)
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
    assert to.shape == x.shape, (to.shape, x.shape)
    return added_experts(to, x, None, x, x, x[:, :0], first, second, scale, eps, from_one)


def added_experts(
    to: Tensor,
    outputs: Tensor,
    biases: Tensor | None,
    places: Tensor,
    experts: Tensor,
    shares: Tensor,
    first: Tensor | None,
    second: Tensor,
    scale: float,
    eps: float,
    from_one: bool,
) -> Tensor:
    """As `fused.added_experts`. With no shares, (rows, 0), the outputs are what is added."""
    of_experts, out = (biases, places, experts, shares), torch.empty_like(to)
    tensors = [to if one is None else one for one in (to, outputs, first, second, out, *of_experts)]
    assert all(one.is_contiguous() for one in tensors), [one.stride() for one in tensors]
    (rows, width), tile = to.shape, triton.next_power_of_2(to.shape[1])
    _added[(rows,)](
        *(*tensors, scale, eps, width, shares.shape[1]),
        *(biases is not None, first is not None, from_one, tile),
        num_warps=min(16, max(1, tile // 512)),
    )
    return out


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
    """As `mixture.chosen`."""
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
    """As `mixture.by_expert`, which computes it for very many."""
    pairs, tile = experts.numel(), 64
    if pairs > PAIRS_MAX:
        return mixture.by_expert(experts, count)
    assert experts.is_contiguous(), experts.stride()
    rows, sorted_experts, places = (experts.new_empty(pairs) for _ in range(3))
    ends = experts.new_empty(count, dtype=torch.int32)
    grid = (triton.cdiv(max(pairs, count), tile),)
    _by_expert[grid](experts, rows, sorted_experts, places, ends, pairs, count, experts.shape[1], tile)
    return rows, sorted_experts, places, ends


@triton.jit
def _gated_rows(  # type: ignore[no-untyped-def]
    x,
    biases,
    experts,
    out,
    outputs,
    alpha,
    limit,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of one row. What is no number passes every cut."""
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = o < outputs
    dtype = out.dtype.element_ty
    gates = 2 * o if CLAMPED else o
    ups = 2 * o + 1 if CLAMPED else outputs + o
    x += row * outputs * 2
    gate = tl.load(x + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + ups, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        biases += tl.load(experts + row) * outputs * 2
        gate += tl.load(biases + gates, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(biases + ups, mask=inside, other=0.0).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up = (up + 1.0).to(dtype).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-(gate * alpha).to(dtype).to(tl.float32)))
        gate *= share.to(dtype).to(tl.float32)
    else:
        gate = _activated(gate, ACTIVATION)
    found = (gate.to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(out + row * outputs + o, found, mask=inside)


def gated_rows(
    x: Tensor, biases: Tensor | None, experts: Tensor, activation: str, clamp: Sequence[float] | None
) -> Tensor:
    """As `mixture.gated_rows`."""
    (rows, width), tile = x.shape, 1024
    tensors = (x, x if biases is None else biases, experts, x.new_empty((rows, width // 2)))
    assert all(one.is_contiguous() for one in tensors), [one.stride() for one in tensors]
    alpha, limit = clamp or (0.0, 0.0)
    settings = (biases is not None, clamp is not None, activation, tile)
    _gated_rows[rows, triton.cdiv(width // 2, tile)](*tensors, width // 2, alpha, limit, *settings)
    return tensors[3]
