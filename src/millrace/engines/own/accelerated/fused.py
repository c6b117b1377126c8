"""The forward pass on GPUs, with kernels in place of many operations of a layer.

`rotated` reads what the qkv matmul gave: it normalises and rotates queries and keys, and writes keys and
values into the cache. `attended` is the attention of decode steps: all queries of a kv head read its keys
together, and few rows split them. `gated_linear` multiplies few rows with the weights of gate and up, and
applies the gate. `added` adds what a matmul gave to the residual stream, with the norms before and after.
So a layer of a decode step is eight launches: qkv, `rotated`, `attended`, out, `added`, `gated_linear`, down,
`added`. Where nothing is normalised or scaled before it is added, the matmul adds, and the norm is torch's.

In a mixture `chosen` finds the experts of rows, and `by_expert` sorts rows by expert.

Each is an operator of torch. On a GPU Triton's kernel computes it (`layer_tiles`), on a CPU the operations of
`ForwardPass`, which define the numbers. A kernel rounds where they round, but sums in another order.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, W the rotated part of it, T tokens of the
cache, S slots, P positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from millrace.devices.operators import OPERATORS, agrees, define
from millrace.engines.own.accelerated.flash import FlashAttention
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.forward import (
    ACTIVATIONS,
    Attention,
    ForwardPass,
    RootMeanSquare,
    Rotary,
    by_expert,
    chosen,
    gated,
    heads_of,
)
from millrace.engines.own.parameters import Layer

Tensor = torch.Tensor
ROWS_MAX = 256
"""With more rows arithmetic takes the time: torch multiplies, and the gate is a launch of its own."""
TOLERANCE = 0.02  # of a kernel in 16 bits, relative to its result


class FusedPass(ForwardPass):
    """A forward pass on a GPU. Only over the cache of flash attention do kernels attend. `fuses`: whether
    kernels compute. Otherwise each operation is alone, and its result can be looked at."""

    fuses = True

    def __init__(
        self, architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(architecture, num_positions, dtype, device)
        self.mixture.choose, self.mixture.sort = OPERATORS.chosen, OPERATORS.by_expert

    def _attention(
        self, index: int, layer: Layer, x: Tensor, rotary: Rotary, attention: Attention, attended: Tensor
    ) -> Tensor:
        if not (self.fuses and isinstance(attention, FlashAttention)):
            return super()._attention(index, layer, x, rotary, attention, attended)
        shape, count = self._architecture, len(attention.rows_M)
        qkv = self.matmul.linear(x, layer.qkv, layer.qkv_bias)
        norms, memory = (layer.q_norm, layer.k_norm), attention.memory(index)
        settings = (shape.eps, shape.norm_from_one, shape.neighbours)
        q_MHD = OPERATORS.rotated(qkv, *norms, *rotary, attention.rows_M, *memory, *settings)
        if attention.counts is not None:
            cache, kernel = attention.cache, attention.kernel
            memory = cache.keys[index], cache.values[index]
            numbers = attention.used_R, attention.counts, kernel.scale, kernel.windows[index]
            out: Tensor = OPERATORS.attended(q_MHD, *memory, *numbers)
            return out
        found = attention.attended(index, q_MHD)
        return found if count == len(x) else F.pad(found, (0, 0, 0, 0, 0, len(x) - count))

    def _gated(self, layer: Layer, x: Tensor) -> Tensor:
        if not self.fuses or len(x) > ROWS_MAX or self._architecture.clamp is not None:
            return super()._gated(layer, x)
        activation = self._architecture.activation
        out: Tensor = OPERATORS.gated_linear(x, layer.gate_up, layer.gate_up_bias, activation)
        return out

    def _add_linear(
        self, to: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, after: Tensor
    ) -> Tensor:
        if not self.fuses or bias is None:
            return super()._add_linear(to, x, weight, bias, norm, after)
        return self._add(to, self.matmul.linear(x, weight, bias), norm, after)

    def _add(self, to: Tensor, x: Tensor, norm: Tensor | None, after: Tensor) -> Tensor:
        if not self.fuses:
            return super()._add(to, x, norm, after)
        shape = self._architecture
        settings = (shape.residual_scale, shape.eps, shape.norm_from_one)
        out: Tensor = OPERATORS.added(to, x, norm, after, *settings)
        return out


def gpu_pass(
    architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
) -> ForwardPass:
    """A `FusedPass`, if Triton runs on `device` and its kernels agree with the plain operations."""
    arguments = (architecture, num_positions, dtype, device)
    what = "layers of the engine are computed"
    fuses = agrees(what, lambda: disagreement(architecture, dtype, device), TOLERANCE)
    return (FusedPass if fuses else ForwardPass)(*arguments)


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
    used = torch.tensor([300, 1, 64, 65, 200], dtype=torch.int32, device=device)
    queries, memory = random(rows, architecture.num_heads, dim), random(2, rows, 300, kv_heads, dim)
    counts = torch.zeros_like(used.repeat(kv_heads))
    width = architecture.shapes["model.norm.weight"][0]
    (stream, more), (first, second) = random(2, rows, width), random(2, width)
    numbers = architecture.residual_scale, architecture.eps, architecture.norm_from_one
    num_experts = next((x[0] for name, x in architecture.shapes.items() if ".experts." in name), 1)
    logits, routed = random(rows, num_experts), architecture.routed
    pairs = torch.randint(num_experts, (rows, routed), generator=generator).to(device)
    names = ("rotated", "attended", "gated_linear", "added", "chosen", "by_expert")
    plain: Any = (rotated, attended, gated_linear, added, chosen, by_expert)
    results = []
    for rotate, attend, multiply, add, choose, sort in ([getattr(OPERATORS, x) for x in names], plain):
        cache = torch.zeros((2, 8, kv_heads, dim), dtype=dtype, device=device)
        q = rotate(qkv, *norms, *turns, places, *cache, *settings)
        outs = [attend(queries, *memory, used, counts, architecture.scale, window) for window in (None, 70)]
        to = torch.stack([stream, stream])
        sums = [add(to[i], more, norm, second, *numbers) for i, norm in enumerate((first, None))]
        results.append([q, cache, *outs, multiply(*matmul), to, *sums])
        if routed:
            shares, experts = choose(logits, routed, True)
            results[-1] += [shares, logits.gather(1, experts), *sort(pairs, num_experts)]
    return torch.stack([_gap(a, b) for a, b in zip(*results, strict=True)]).max().item()


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """Numbers of rows and experts are equal, or all wrong."""
    if a.is_floating_point():
        return (a.float() - b.float()).norm() / b.float().norm()
    return (a != b).any().float()


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


def attended(
    q_MHD: Tensor,
    keys_SPKD: Tensor,
    values_SPKD: Tensor,
    used_M: Tensor,
    counts: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """(M, H, D) of a decode step of the first slots: each query sees the last `window` of the `used_M` tokens
    of its slot. `counts`: (S K,) int32, zeros before and after."""
    (rows, _, dim), (_, positions, kv_heads, _) = q_MHD.shape, keys_SPKD.shape
    queries = q_MHD.view(rows, kv_heads, -1, dim).float()
    behind = used_M[:, None] - 1 - torch.arange(positions, device=used_M.device)
    seen = (behind >= 0) & (behind < (positions if window is None else window))
    scores = torch.einsum("mkgd,mpkd->mkgp", queries, keys_SPKD[:rows].float()) * scale
    weights = scores.masked_fill_(~seen[:, None, None], float("-inf")).softmax(-1)
    out = torch.einsum("mkgp,mpkd->mkgd", weights, values_SPKD[:rows].float())
    return out.reshape(q_MHD.shape).to(q_MHD.dtype)


def gated_linear(x_MI: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """(M, O): activation(gate) up. The first half of the outputs of `weight`, (2 O, I), is the gate."""
    return gated(ACTIVATIONS[activation], F.linear(x_MI, weight, bias))


def added(
    to: Tensor, x: Tensor, first: Tensor | None, second: Tensor, scale: float, eps: float, from_one: bool
) -> Tensor:
    """to += scale x, with x normalised if there is a `first` norm. Returns `to`, normalised with `second`."""
    norm = RootMeanSquare(eps, to.dtype, to.device, from_one=from_one)
    to.add_(x if first is None else norm(x, first), alpha=scale)
    return norm(to, second)


def _chosen_shape(logits: Tensor, count: int, sum_1: bool) -> tuple[Tensor, Tensor]:
    shares = logits.new_empty((len(logits), count), dtype=torch.float32)
    return shares, torch.empty_like(shares, dtype=torch.int64)


def _by_expert_shape(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one, other, third = (experts.new_empty(experts.numel()) for _ in range(3))
    return one, other, third, experts.new_empty(count, dtype=torch.int32)


def _rotated_shape(qkv: Tensor, *arguments: Any) -> Tensor:
    places_M, (_, kv_heads, dim) = arguments[4], arguments[5].shape
    return qkv.new_empty((len(places_M), qkv.shape[1] // dim - 2 * kv_heads, dim))


def _gated_shape(x_MI: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    return x_MI.new_empty((len(x_MI), len(weight) // 2))


def _same_shape(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x)


KERNELS = "millrace.engines.own.accelerated.layer_tiles"
define(
    "rotated(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor signed_sin, Tensor places,"
    " Tensor(a!) keys, Tensor(b!) values, float eps, bool from_one, bool neighbours) -> Tensor",
    KERNELS,
    shape=_rotated_shape,
    plain=rotated,
)
define(
    "attended(Tensor q, Tensor keys, Tensor values, Tensor used, Tensor(a!) counts, float scale, int? window)"
    " -> Tensor",
    KERNELS,
    shape=_same_shape,
    plain=attended,
)
define(
    "gated_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    KERNELS,
    shape=_gated_shape,
    plain=gated_linear,
)
define(
    "added(Tensor(a!) to, Tensor x, Tensor? first, Tensor second, float scale, float eps, bool from_one)"
    " -> Tensor",
    KERNELS,
    shape=_same_shape,
    plain=added,
)
define(
    "chosen(Tensor logits, int count, bool sum_1) -> (Tensor, Tensor)",
    KERNELS,
    shape=_chosen_shape,
    plain=chosen,
)
define(
    "by_expert(Tensor experts, int count) -> (Tensor, Tensor, Tensor, Tensor)",
    KERNELS,
    shape=_by_expert_shape,
    plain=by_expert,
)
