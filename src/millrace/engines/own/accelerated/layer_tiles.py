"""The kernels of `fused` in Triton. Numbers are rounded where the operations of `ForwardPass` round them.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, W the rotated part of it, T tokens of the
cache, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
