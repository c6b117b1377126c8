"""The decoder's forward pass: tokens in rows, any mixture of sequences, keys and values cached.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, I
intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.mixture import ExpertMixture, Routed, gate_of, summed
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
        self.mixture = ExpertMixture(architecture, dtype, device)
        self._gate = gate_of(architecture.activation, architecture.clamp)

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
                routed = self.mixture(self.matmul, layer, layer.router, normed, next(routing, None))
                normed = self._add_experts(x, routed, layer.down_norm, after)
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

    def _add_experts(self, to: Tensor, routed: Routed, norm: Tensor | None, after: Tensor) -> Tensor:
        """As `_add`, of the weighted sum of each row's experts."""
        return self._add(to, summed(*routed), norm, after)


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
