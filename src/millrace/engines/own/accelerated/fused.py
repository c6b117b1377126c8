"""The forward pass on GPUs, with two kernels in place of many operations of a layer.

`rotated` reads what the qkv matmul gave: it normalises and rotates queries and keys, and writes keys and
values into the cache. `gated_linear` multiplies few rows with the weights of gate and up, and applies the
gate. So a layer of a decode step is eight launches: norm, qkv, `rotated`, attention, out with the addition,
norm, `gated_linear`, down with the addition.

Each is an operator of torch. On a GPU Triton's kernel computes it (`layer_tiles`), on a CPU the operations of
`ForwardPass`, which define the numbers. A kernel rounds where they round, but sums in another order.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, W the rotated part of it, T tokens of the
cache.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F

from millrace.devices.operators import OPERATORS, define
from millrace.engines.own.accelerated.flash import FlashAttention
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.forward import (
    ACTIVATIONS,
    Attention,
    ForwardPass,
    RootMeanSquare,
    gated,
    heads_of,
)
from millrace.engines.own.parameters import Layer

Tensor = torch.Tensor
LOG = logging.getLogger(__name__)
ROWS_MAX = 256
"""With more rows arithmetic takes the time: torch multiplies, and the gate is a launch of its own."""
TOLERANCE = 0.02  # of a kernel in 16 bits, relative to its result


class FusedPass(ForwardPass):
    """A forward pass over the cache of flash attention. `fuses`: whether the kernels compute. Otherwise each
    operation is alone, and its result can be looked at."""

    fuses = True

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Attention,
        attended: Tensor,
    ) -> Tensor:
        if not self.fuses:
            return super()._attention(index, layer, x, rotary, attention, attended)
        assert isinstance(attention, FlashAttention), attention
        shape, count = self._architecture, len(attention.rows_M)
        qkv = self.matmul.linear(x, layer.qkv, layer.qkv_bias)
        norms, memory = (layer.q_norm, layer.k_norm), attention.memory(index)
        settings = (shape.eps, shape.norm_from_one, shape.neighbours)
        q_MHD = OPERATORS.rotated(qkv, *norms, *rotary, attention.rows_M, *memory, *settings)
        found = attention.attended(index, q_MHD)
        return found if count == len(x) else F.pad(found, (0, 0, 0, 0, 0, len(x) - count))

    def _gated(self, layer: Layer, x: Tensor) -> Tensor:
        if not self.fuses or len(x) > ROWS_MAX or self._architecture.clamp is not None:
            return super()._gated(layer, x)
        activation = self._architecture.activation
        out: Tensor = OPERATORS.gated_linear(x, layer.gate_up, layer.gate_up_bias, activation)
        return out


def gpu_pass(
    architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
) -> ForwardPass:
    """A `FusedPass`, if Triton runs on `device` and its kernels agree with the plain operations."""
    arguments = (architecture, num_positions, dtype, device)
    try:
        gap = disagreement(architecture, dtype, device)
    except Exception as error:  # Triton, its compiler and its driver raise errors of every kind
        LOG.warning("layers of the engine are computed without fused kernels: %s", error)
        return ForwardPass(*arguments)
    if not gap < TOLERANCE:
        LOG.warning("layers of the engine are computed without fused kernels: they are off by %g", gap)
        return ForwardPass(*arguments)
    LOG.info("layers of the engine are computed with fused kernels")
    return FusedPass(*arguments)


def disagreement(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative distance of a kernel's result from the plain operations', on random rows."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    rows, kv_heads, dim = 5, architecture.num_kv_heads, architecture.head_dim
    qkv = random(rows, (architecture.num_heads + 2 * kv_heads) * dim)
    normed = any(name.endswith("q_norm.weight") for name in architecture.shapes)
    norms = (random(dim), random(dim)) if normed else (None, None)
    turns = [random(rows, dim), random(rows, dim)]
    places = torch.tensor([6, 2, 0, 7, 4], device=device)
    settings = (architecture.eps, architecture.norm_from_one, architecture.neighbours)
    matmul = (random(rows, 72), random(2 * 40, 72), random(2 * 40), architecture.activation)
    plain: Any = (rotated, gated_linear)
    results = []
    for rotate, multiply in ((OPERATORS.rotated, OPERATORS.gated_linear), plain):
        cache = torch.zeros((2, 8, kv_heads, dim), dtype=dtype, device=device)
        q = rotate(qkv, *norms, *turns, places, *cache, *settings)
        results.append([q, cache, multiply(*matmul)])
    pairs = ((a.float(), b.float()) for a, b in zip(*results, strict=True))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


# ---------------------------------------------------------------- the operators


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
    """Queries (M, H, D) of the first rows of `qkv`, (M or more, (H + 2 K) D). Their keys and values are
    written into the cache, at `places_M`. `cos_MW`, `signed_sin_MW`: of the rows, in any shape."""
    count, (_, kv_heads, dim) = len(places_M), keys_TKD.shape
    norm = RootMeanSquare(eps, qkv.dtype, qkv.device, from_one=from_one)
    heads = qkv[:count].unflatten(1, (-1, dim))
    turns = (cos_MW[:count].view(count, 1, -1), signed_sin_MW[:count].view(count, 1, -1))
    q, k, v = heads_of(heads, norm, (q_norm, k_norm), turns, kv_heads=kv_heads, neighbours=neighbours)
    keys_TKD.index_copy_(0, places_M, k)
    values_TKD.index_copy_(0, places_M, v)
    return q.contiguous()


def gated_linear(x_MI: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """(M, O): activation(gate) up. The first half of the outputs of `weight`, (2 O, I), is the gate."""
    return gated(ACTIVATIONS[activation], F.linear(x_MI, weight, bias))


def _rotated_shape(qkv: Tensor, *arguments: Any) -> Tensor:
    places_M, (_, kv_heads, dim) = arguments[4], arguments[5].shape
    return qkv.new_empty((len(places_M), qkv.shape[1] // dim - 2 * kv_heads, dim))


def _gated_shape(x_MI: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    return x_MI.new_empty((len(x_MI), len(weight) // 2))


KERNELS = "millrace.engines.own.accelerated.layer_tiles"
define(
    "rotated(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor signed_sin, Tensor places,"
    " Tensor(a!) keys, Tensor(b!) values, float eps, bool from_one, bool neighbours) -> Tensor",
    KERNELS,
    shape=_rotated_shape,
    plain=rotated,
)
define(
    "gated_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    KERNELS,
    shape=_gated_shape,
    plain=gated_linear,
)
