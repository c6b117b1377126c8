"""The decoder's forward pass: tokens in rows, any mixture of sequences, keys and values cached.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, I intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from millrace.rollout.architecture import Architecture
from millrace.rollout.parameters import Layer, Parameters
from millrace.rollout.products import FASTEST, Products

Tensor = torch.Tensor
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class ForwardPass:
    """Stateless but for the rotary tables: weights and attention are arguments of every call.

    `products` says how rows are multiplied, and may be exchanged between two calls.
    """

    def __init__(
        self, architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._architecture = architecture
        self.products: Products = FASTEST
        cos, sin = architecture.rotary_tables(num_positions, dtype, device)
        sin[:, : architecture.head_dim // 2] *= -1
        self._cos, self._sin = cos.unsqueeze(1), sin.unsqueeze(1)
        self._norm = RootMeanSquare(architecture.eps, dtype, device)

    def hidden(
        self, weights: Parameters, tokens_M: Tensor, positions_M: Tensor, attention: Attention
    ) -> Tensor:
        """Final hidden states (M, hidden). M is as `products.rows` wants it; padding rows hold rubbish, and
        `attention` skips them."""
        shape = self._architecture
        rotary = self._cos[positions_M], self._sin[positions_M]
        x = F.embedding(tokens_M, weights.embedding)
        attended = x.new_zeros((len(x), shape.num_heads, shape.head_dim))
        for index, layer in enumerate(weights.layers):
            self._attention(index, layer, self._norm(x, layer.input_norm), rotary, attention, attended)
            self.products.add_linear(x, attended.view(len(x), -1), layer.out, layer.out_bias)
            gated = self._gated(layer, self._norm(x, layer.post_norm))
            self.products.add_linear(x, gated, layer.down, layer.down_bias)
        return self._norm(x, weights.norm)

    def logits(self, weights: Parameters, hidden: Tensor, count: int) -> Tensor:
        """(count, V) in float32."""
        return self.products.linear(hidden, weights.head, None)[:count].float()

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Attention,
        attended: Tensor,
    ) -> None:
        shape = self._architecture
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = self.products.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, shape.head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = self._norm(qk)
            qk[:, :heads] *= layer.q_norm
            qk[:, heads:] *= layer.k_norm
        qk = _rotate(qk, *rotary)
        attention(index, qk[:, :heads], qk[:, heads:], v, attended)

    def _gated(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = self.products.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        return F.silu(gate).mul_(up)


class RootMeanSquare:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    On a CPU in float32 it is put together here: `F.rms_norm` takes twice the time for few rows.
    """

    def __init__(self, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = eps
        self._eps_1 = torch.tensor(eps) if device.type == "cpu" and dtype == torch.float32 else None

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if self._eps_1 is None:
            return F.rms_norm(x, x.shape[-1:], weight, self._eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        out = x * torch.addcmul(self._eps_1, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return out if weight is None else out.mul_(weight)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), signed_sin)
