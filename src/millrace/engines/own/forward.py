"""The decoder's forward pass: tokens in rows, any mixture of sequences, keys and values cached, mixtures of
experts.

Shape suffixes: M rows, sorted by expert where the code says so, H query heads, K kv heads, D head_dim, I
intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from millrace.devices.matmul import group_ends, grouped_linear, has_grouped
from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.parameters import Layer, Parameters

Tensor = torch.Tensor
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
Norms = tuple[Tensor | None, Tensor | None]
Rotary = tuple[Tensor, Tensor]
"""Cosines, and sines with their signs: tables, or those of rows."""


class ForwardPass:
    """The forward pass of an architecture, with rows in `dtype`. Its only state is the rotary tables: weights
    and attention are arguments of every call.

    `matmul` multiplies rows, and may be exchanged between two calls. `routing`, if set, gets the experts of
    each row in each layer that has experts: (rows, layers, experts of a row). Calls with more rows leave it.
    """

    def __init__(
        self, architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._architecture, self._dtype = architecture, dtype
        self.matmul = RowMatmul()
        self.routing: Tensor | None = None
        self.tables: dict[str | None, Rotary] = {}
        for rope in set(architecture.ropes):
            cos, sin = architecture.rotary_tables(rope, num_positions, dtype, device)
            half = sin.shape[1] // 2
            if architecture.neighbours:
                cos, sin = (table[:, :half].repeat_interleave(2, dim=1) for table in (cos, sin))
                sin[:, ::2] *= -1
            else:
                sin[:, :half] *= -1
            self.tables[rope] = cos.unsqueeze(1), sin.unsqueeze(1)
        self._norm = RootMeanSquare(architecture.eps, dtype, device, from_one=architecture.norm_from_one)
        self.mixture, self._gate = ExpertMixture(architecture, dtype, device), gate_of(architecture)

    def hidden(
        self, weights: Parameters, tokens_M: Tensor, positions_M: Tensor, attention: Attention
    ) -> Tensor:
        """Final hidden states (M, hidden). M is a number of `matmul.rows`. Padding rows have arbitrary
        values, and `attention` skips them."""
        shape = self._architecture
        rotary = {rope: (cos[positions_M], sin[positions_M]) for rope, (cos, sin) in self.tables.items()}
        x = F.embedding(tokens_M, weights.embedding).to(self._dtype)
        if shape.embedding_scale != 1.0:
            x *= shape.embedding_scale
        attended = x.new_zeros((len(x), shape.num_heads, shape.head_dim))
        routing = iter(() if self.routing is None or len(x) > len(self.routing) else self.routing.unbind(1))
        norms = [layer.input_norm for layer in weights.layers]
        normed = self._norm(x, norms[0])
        for index, (layer, after) in enumerate(zip(weights.layers, [*norms[1:], weights.norm], strict=True)):
            turn = rotary[shape.ropes[index]]
            found = self._attention(index, layer, normed, turn, attention, attended).flatten(1)
            normed = self._add_linear(x, found, layer.out, layer.out_bias, layer.out_norm, layer.mlp_norm)
            if layer.router is None:
                out = self._gated(layer, normed)
                normed = self._add_linear(x, out, layer.down, layer.down_bias, layer.down_norm, after)
            else:
                out = self.mixture(self.matmul, layer, layer.router, normed, next(routing, None))
                normed = self._add(x, out, layer.down_norm, after)
        return normed

    def logits(self, weights: Parameters, hidden: Tensor, count: int) -> Tensor:
        """(count, V) in float32."""
        logits = self.matmul.logits(hidden, weights.head)[:count]
        cap, scale = self._architecture.logits_cap, self._architecture.logits_scale
        logits = logits if scale == 1.0 else logits.div_(scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, rotary: Rotary, attention: Attention, attended: Tensor
    ) -> Tensor:
        """(M, H, D), written to `attended`."""
        shape = self._architecture
        qkv = self.matmul.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, shape.head_dim)
        norms = (layer.q_norm, layer.k_norm)
        q, k, v = heads_of(
            qkv, self._norm, norms, rotary, kv_heads=shape.num_kv_heads, neighbours=shape.neighbours
        )
        attention(index, q, k, v, attended, layer.sinks)
        return attended

    def _gated(self, layer: Layer, x: Tensor) -> Tensor:
        return self._gate(self.matmul.linear(x, layer.gate_up, layer.gate_up_bias))

    def _add_linear(
        self, to: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, after: Tensor
    ) -> Tensor:
        """As `_add`, of x weight^T + bias."""
        if norm is None and self._architecture.residual_scale == 1.0:
            self.matmul.add_linear(to, x, weight, bias)
            return self._norm(to, after)
        return self._add(to, self.matmul.linear(x, weight, bias), norm, after)

    def _add(self, to: Tensor, x: Tensor, norm: Tensor | None, after: Tensor) -> Tensor:
        """to += x, normalised if there is a `norm`, and scaled. Returns `to`, normalised with `after`."""
        to.add_(x if norm is None else self._norm(x, norm), alpha=self._architecture.residual_scale)
        return self._norm(to, after)


class RootMeanSquare:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; `from_one`: * (1 + weight).

    In float32 on a CPU the norm is composed here: `F.rms_norm` takes twice the time for few rows.
    """

    def __init__(self, eps: float, dtype: torch.dtype, device: torch.device, *, from_one: bool) -> None:
        self._eps, self._from_one = eps, from_one
        self._eps_1 = torch.tensor(eps) if device.type == "cpu" and dtype == torch.float32 else None

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if self._eps_1 is None:
            if not self._from_one:
                return F.rms_norm(x, x.shape[-1:], weight, self._eps)
            out = F.rms_norm(x, x.shape[-1:], None, self._eps)
        else:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            out = x * torch.addcmul(self._eps_1, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return out if weight is None else self.scale(out, weight)

    def scale(self, x: Tensor, weight: Tensor) -> Tensor:
        """In place."""
        return x.addcmul_(x, weight) if self._from_one else x.mul_(weight)


def heads_of(
    qkv: Tensor, norm: RootMeanSquare, norms: Norms, rotary: Rotary, *, kv_heads: int, neighbours: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (M, heads, D) of `qkv`: queries and keys normalised if there are `norms`, and
    rotated."""
    heads = qkv.shape[1] - 2 * kv_heads
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if norms[0] is not None and norms[1] is not None:
        qk = norm(qk)
        norm.scale(qk[:, :heads], norms[0])
        norm.scale(qk[:, heads:], norms[1])
    qk = _rotate(qk, *rotary, neighbours=neighbours)
    return qk[:, :heads], qk[:, heads:], v


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor, *, neighbours: bool) -> Tensor:
    """Rotate the first dimensions of each head, as many as the tables have."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        turned = _rotate(x[..., :width], cos, signed_sin, neighbours=neighbours)
        return torch.cat([turned, x[..., width:]], dim=-1)
    other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if neighbours else x.roll(width // 2, -1)
    return (x * cos).addcmul_(other, signed_sin)


# ---------------------------------------------------------------- mixtures of experts


class ExpertMixture:
    """The experts of an architecture. `grouped`: all of a layer are computed in grouped matmuls. `choose` and
    `sort` may be exchanged for kernels."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._routed, self._sum_1 = architecture.routed, architecture.routed_sum_1
        self._gate, self.choose, self.sort = gate_of(architecture), chosen, by_expert
        experts = (shape for name, shape in architecture.shapes.items() if ".experts." in name)
        self.grouped = architecture.routed > 0 and has_grouped(device, dtype, experts)

    def __call__(
        self, matmul: RowMatmul, layer: Layer, router: Tensor, x: Tensor, routing: Tensor | None
    ) -> Tensor:
        """The weighted sum of each row's experts, which are written to `routing`. Rows are sorted by expert,
        each expert computes its rows, and the outputs are sorted back. Without `grouped` the host waits for a
        GPU once: for the number of rows of each expert."""
        logits = matmul.linear(x, router, layer.router_bias)
        shares, experts = self.choose(logits, self._routed, self._sum_1)
        if routing is not None:
            routing[: len(x)] = experts
        rows_M, experts_M, places, ends = self.sort(experts, len(layer.gate_up))
        outputs = self._outputs(matmul, layer, x[rows_M], experts_M, ends)
        by_row = outputs[places].view(len(x), self._routed, -1)
        return (by_row * shares[:, :, None].to(x.dtype)).sum(dim=1)

    def expert(self, matmul: RowMatmul, layer: Layer, index: int, x: Tensor) -> Tensor:
        """The outputs of one expert for rows x, without the expert's weight. As many rows come out."""
        padded = F.pad(x, (0, 0, 0, matmul.rows(len(x)) - len(x)))
        gate_up_bias, down_bias = (
            None if bias is None else bias[index] for bias in (layer.gate_up_bias, layer.down_bias)
        )
        gated = self._gate(matmul.linear(padded, layer.gate_up[index], gate_up_bias))
        return matmul.linear(gated, layer.down[index], down_bias)[: len(x)]

    def _outputs(
        self, matmul: RowMatmul, layer: Layer, rows: Tensor, experts_M: Tensor, ends: Tensor
    ) -> Tensor:
        """Of each row what its expert makes of it. See `by_expert`."""
        if self.grouped:
            gate_up = _biased(grouped_linear(rows, layer.gate_up, ends), layer.gate_up_bias, experts_M)
            return _biased(grouped_linear(self._gate(gate_up), layer.down, ends), layer.down_bias, experts_M)
        counts = experts_M.bincount(minlength=len(ends)).tolist()
        blocks = enumerate(rows.split(counts))
        return torch.cat([self.expert(matmul, layer, index, some) for index, some in blocks if len(some)])


def chosen(logits: Tensor, count: int, sum_1: bool) -> tuple[Tensor, Tensor]:
    """Of each row the shares and the numbers of its experts, (rows, `count`)."""
    shares, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(count, dim=-1)
    if sum_1:
        shares /= shares.sum(dim=-1, keepdim=True)
    return shares, experts


def by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of a row and its expert, sorted by expert: rows, experts, where each pair of `experts` lies among
    the sorted ones, and where those of each of `count` experts end."""
    experts_M, order = experts.flatten().sort(stable=True)
    return order // experts.shape[1], experts_M, order.argsort(), group_ends(experts_M, count)


def _biased(x: Tensor, biases: Tensor | None, experts_M: Tensor) -> Tensor:
    return x if biases is None else x + biases[experts_M]


Gate = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Gate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations by their names in transformers."""


def gate_of(architecture: Architecture) -> Gate:
    if architecture.clamp is not None:
        return partial(clamped, *architecture.clamp)
    return partial(gated, ACTIVATIONS[architecture.activation])


def gated(activation: Gate, gate_up: Tensor) -> Tensor:
    """activation(gate) up. The first half of the columns is the gate."""
    gate, up = gate_up.chunk(2, dim=1)
    return activation(gate).mul_(up)


def clamped(alpha: float, limit: float, gate_up: Tensor) -> Tensor:
    """gate sigmoid(alpha gate) (up + 1), of values that are cut at `limit`; the gate is not cut below. Every
    second column is the gate: gpt-oss, arXiv:2508.10925."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate)).mul_(up.add_(1))
