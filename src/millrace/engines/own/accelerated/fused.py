"""The forward pass on GPUs, with kernels in place of many operations of a layer.

`rotated` reads what the qkv matmul gave: it normalises and rotates queries and keys, and writes keys and
values into the cache. `attended` is the attention of decode steps, and of prompts where scores have caps or
sinks: all queries of a kv head read its keys together, and few rows split them. `gated_linear` multiplies few
rows with the weights of gate and up, and applies the gate. `added` adds what a matmul gave to the residual
stream, with the norms before and after. So a layer of a decode step is eight launches: qkv, `rotated`,
`attended`, out, `added`, `gated_linear`, down, `added`. Where nothing is normalised or scaled before it is
added, the matmul adds, and the norm is torch's.

In a mixture `chosen` finds the experts of rows, and `by_expert` sorts rows by expert. Between the grouped
matmuls `gated_rows` adds biases and applies the gate. `added_experts` adds the weighted sum of each row's
experts. So a layer is 13 launches: qkv, `rotated`, `attended`, out, `added`, the router, `chosen`,
`by_expert`, rows sorted, gate and up, `gated_rows`, down, `added_experts`.

Each is an operator of torch. On a GPU Triton's kernel computes it (`layer_tiles`, `attention_tiles`), on a
CPU the operations of `ForwardPass`, which define the numbers. A kernel rounds where these round, but sums in
another order.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, W the rotated part of it, T tokens of the
cache, S slots, P positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from millrace.devices.operators import OPERATORS, agrees, define
from millrace.engines.own.accelerated.flash import FlashAttention, tiles_of
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.forward import Attention, ForwardPass, RootMeanSquare, Rotary, heads_of
from millrace.engines.own.mixture import ACTIVATIONS, Routed, by_expert, chosen, gated, gated_rows, summed
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
        self.mixture.gate = OPERATORS.gated_rows

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
        attend = attention.attended if attention.tiled is None else attention.by_tiles
        found = attend(index, q_MHD, layer.sinks)
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
        out: Tensor = OPERATORS.added(to, x, norm, after, *_sums(self._architecture))
        return out

    def _add_experts(self, to: Tensor, routed: Routed, norm: Tensor | None, after: Tensor) -> Tensor:
        if not self.fuses:
            return super()._add_experts(to, routed, norm, after)
        out: Tensor = OPERATORS.added_experts(to, *routed, norm, after, *_sums(self._architecture))
        return out


def _sums(architecture: Architecture) -> tuple[float, float, bool]:
    """How rows join the residual stream."""
    return architecture.residual_scale, architecture.eps, architecture.norm_from_one


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

    def results(run: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        mixture = _mixture_example(run, architecture, random) if architecture.routed else []
        return _layer_example(run, architecture, random) + mixture

    pairs = zip(results(OPERATORS), results(sys.modules[__name__]), strict=True)
    return torch.stack([_gap(a, b) for a, b in pairs]).max().item()


def _layer_example(run: Any, architecture: Architecture, random: Callable[..., Tensor]) -> list[Tensor]:
    """What a layer's operators of `run` make of 5 rows."""
    rows, heads, kv_heads = 5, architecture.num_heads, architecture.num_kv_heads
    dim, width = architecture.head_dim, architecture.shapes["model.norm.weight"][0]
    qkv, turns = random(rows, (heads + 2 * kv_heads) * dim), [random(rows, dim), random(rows, dim)]
    normed = any(name.endswith("q_norm.weight") for name in architecture.shapes)
    norms = (random(dim), random(dim)) if normed else (None, None)
    places, cache = torch.tensor([6, 2, 0, 7, 4], device=qkv.device), 0 * random(2, 8, kv_heads, dim)
    settings = (architecture.eps, architecture.norm_from_one, architecture.neighbours)
    results = [run.rotated(qkv, *norms, *turns, places, *cache, *settings), cache]
    matmul = (random(rows, 72), random(2 * 40, 72), random(2 * 40), architecture.activation)
    results.append(run.gated_linear(*matmul))
    used = torch.tensor([300, 1, 64, 65, 200], dtype=torch.int32, device=qkv.device)
    queries, memory = random(rows, heads, dim), random(2, rows, 300, kv_heads, dim)
    sinks = random(heads) if architecture.sinks else None
    tensors = (queries, *memory, sinks, used, torch.zeros_like(used.repeat(kv_heads)))
    tiles = torch.tensor(tiles_of([(3, 2), (0, 3)]), device=qkv.device)
    cap = architecture.cap
    scale = architecture.scale if cap is None else cap / dim**0.5  # most scores are near the cap
    for some, window in ((None, None), (None, 70), (tiles, 70)):
        results.append(run.attended(*tensors, some, scale, cap, window))
    for norm in (random(width), None):
        to, more, second = random(rows, width), random(rows, width), random(width)
        results += [run.added(to, more, norm, second, *_sums(architecture)), to]
    return results


def _mixture_example(run: Any, architecture: Architecture, random: Callable[..., Tensor]) -> list[Tensor]:
    rows, routed, width = 5, architecture.routed, architecture.shapes["model.norm.weight"][0]
    count = next(shape[0] for name, shape in architecture.shapes.items() if ".experts." in name)
    logits, to, second = random(rows, count), random(rows, width), random(width)
    outputs, gate_up = random(rows * routed, width), random(rows * routed, 80)
    biases = (None, None) if architecture.clamp is None else (random(count, 80), random(count, width))
    shares, experts = run.chosen(logits, routed, True)
    pairs = random(rows, count).topk(routed).indices
    order = run.by_expert(pairs, count)
    rest = (order[2], pairs, shares, None, second)
    settings = (architecture.activation, architecture.clamp)
    gates = run.gated_rows(gate_up, biases[0], order[1], *settings)
    sums = run.added_experts(to, outputs, biases[1], *rest, *_sums(architecture))
    return [shares, logits.gather(1, experts), *order, gates, sums, to]


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
    sinks_H: Tensor | None,
    used_M: Tensor,
    counts: Tensor,
    tiles_T3: Tensor | None,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Tensor:
    """(M, H, D): each query sees the last `window` of the `used_M` tokens of its slot. See `flash.Tiles`, and
    `attention.Kernel` for scores and sinks. `counts` is zeros before and after."""
    (rows, _, dim), (_, positions, kv_heads, _) = q_MHD.shape, keys_SPKD.shape
    slots = slice(rows) if tiles_T3 is None else tiles_T3[:, 2].repeat_interleave(tiles_T3[:, 1])
    queries = q_MHD.view(rows, kv_heads, -1, dim).float()
    behind = used_M[:, None] - 1 - torch.arange(positions, device=used_M.device)
    seen = (behind >= 0) & (behind < (positions if window is None else window))
    scores = torch.einsum("mkgd,mpkd->mkgp", queries, keys_SPKD[slots].float()) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill_(~seen[:, None, None], float("-inf"))
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.float().view(kv_heads, -1, 1).expand(rows, -1, -1, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :positions]
    out = torch.einsum("mkgp,mpkd->mkgd", weights, values_SPKD[slots].float())
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


def added_experts(
    to: Tensor,
    outputs: Tensor,
    biases: Tensor | None,
    places: Tensor,
    experts: Tensor,
    shares: Tensor,
    *norms_and_numbers: Any,
) -> Tensor:
    """As `added`, of `mixture.summed`."""
    return added(to, summed(outputs, biases, places, experts, shares), *norms_and_numbers)


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


def _half_shape(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty((len(x), x.shape[1] // 2))


def _same_shape(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x)


KERNELS = "millrace.engines.own.accelerated.layer_tiles"
OF_ATTENTION = "millrace.engines.own.accelerated.attention_tiles"
define(
    "rotated(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor signed_sin, Tensor places,"
    " Tensor(a!) keys, Tensor(b!) values, float eps, bool from_one, bool neighbours) -> Tensor",
    KERNELS,
    shape=_rotated_shape,
    plain=rotated,
)
define(
    "attended(Tensor q, Tensor keys, Tensor values, Tensor? sinks, Tensor used, Tensor(a!) counts,"
    " Tensor? tiles, float scale, float? cap, int? window) -> Tensor",
    OF_ATTENTION,
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
    "added_experts(Tensor(a!) to, Tensor outputs, Tensor? biases, Tensor places, Tensor experts,"
    " Tensor shares, Tensor? first, Tensor second, float scale, float eps, bool from_one) -> Tensor",
    KERNELS,
    shape=_same_shape,
    plain=added_experts,
)
define(
    "gated_rows(Tensor x, Tensor? biases, Tensor experts, str activation, float[]? clamp) -> Tensor",
    KERNELS,
    shape=_half_shape,
    plain=gated_rows,
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
