"""The decoder's forward pass: tokens in rows, any mixture of sequences, keys and values cached.

Rows are padded (see `rows`), so that a row's result does not depend on how many others there are.

Shape suffixes: M rows, H query heads, K kv heads, D head_dim, I intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from millrace.rollout.architecture import Architecture
from millrace.rollout.parameters import Layer, Parameters
from millrace.rollout.rows import row_padding

Tensor = torch.Tensor
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class Decoder:
    """Stateless but for the rotary tables: weights and attention are arguments of every call."""

    def __init__(
        self, architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._architecture, self._device = architecture, device
        self._row_multiple = row_padding(dtype, device.type).multiple
        cos, sin = architecture.rotary_tables(num_positions, dtype, device)
        half = architecture.head_dim // 2
        self._cos, self._sin = cos.unsqueeze(1), sin[:, :half].unsqueeze(1)
        self._scale = architecture.head_dim**-0.5

    def hidden(
        self, weights: Parameters, tokens: Sequence[int], positions: Sequence[int], attention: Attention
    ) -> Tensor:
        """Final hidden states (M padded, hidden). Padding rows hold rubbish; `attention` skips them."""
        eps = self._architecture.eps
        tokens_M, positions_M = self._padded(tokens), self._padded(positions)
        rotary = self._cos[positions_M], self._sin[positions_M]
        x = F.embedding(tokens_M, weights.embedding)
        for index, layer in enumerate(weights.layers):
            normed = F.rms_norm(x, layer.input_norm.shape, layer.input_norm, eps)
            x = x + self._attention(index, layer, normed, rotary, attention)
            normed = F.rms_norm(x, layer.post_norm.shape, layer.post_norm, eps)
            x = x + self._mlp(layer, normed)
        return F.rms_norm(x, weights.norm.shape, weights.norm, eps)

    def logits(self, weights: Parameters, hidden: Tensor, count: int) -> Tensor:
        """(count, V) in float32."""
        return F.linear(hidden, weights.head)[:count].float()

    def _attention(
        self, index: int, layer: Layer, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        shape = self._architecture
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = F.rms_norm(qk, (head_dim,), None, shape.eps)
            qk[:, :heads] *= layer.q_norm
            qk[:, heads:] *= layer.k_norm
        qk = self._rotate(qk, *rotary)
        out = torch.zeros((len(x), heads, head_dim), dtype=x.dtype, device=x.device)
        attention(index, qk[:, :heads] * self._scale, qk[:, heads:], v, out)
        return F.linear(out.view(len(x), -1), layer.out, layer.out_bias)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _rotate(self, x: Tensor, cos: Tensor, sin_half: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        out = x * cos
        rotated_first, rotated_second = out.chunk(2, dim=-1)
        rotated_first.addcmul_(second, sin_half, value=-1)
        rotated_second.addcmul_(first, sin_half)
        return out

    def _padded(self, numbers: Sequence[int]) -> Tensor:
        padding = -len(numbers) % self._row_multiple
        return torch.tensor([*numbers, *[0] * padding], device=self._device)
