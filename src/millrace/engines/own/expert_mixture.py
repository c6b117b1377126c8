"""Mixtures of experts in the engine's forward pass.

Shape suffixes: M rows, sorted by expert where the code says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from millrace.devices.grouped import group_ends, grouped_linear, has_grouped
from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.parameters import Layer

Tensor = torch.Tensor


class ExpertMixture:
    """The experts of an architecture. `grouped`: all of a layer are computed in grouped matmuls."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._routed, self._sum_1 = architecture.routed, architecture.routed_sum_1
        self._gate = gate_of(architecture)
        experts = (shape for name, shape in architecture.shapes.items() if ".experts." in name)
        self.grouped = architecture.routed > 0 and has_grouped(device, dtype, experts)

    def __call__(
        self, matmul: RowMatmul, layer: Layer, router: Tensor, x: Tensor, routing: Tensor | None
    ) -> Tensor:
        """The weighted sum of each row's experts, which are written to `routing`. Rows are sorted by expert,
        each expert computes its rows, and the outputs are sorted back. Without `grouped` the host waits for a
        GPU once: for the number of rows of each expert."""
        routing_probs = matmul.linear(x, router, layer.router_bias).softmax(dim=-1, dtype=torch.float32)
        shares, experts = routing_probs.topk(self._routed, dim=-1)
        if routing is not None:
            routing[: len(x)] = experts
        if self._sum_1:
            shares /= shares.sum(dim=-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        outputs = self._outputs(matmul, layer, x[order // self._routed], experts.flatten()[order])
        by_row = outputs[order.argsort()].view(len(x), self._routed, -1)
        return (by_row * shares[:, :, None].to(x.dtype)).sum(dim=1)

    def expert(self, matmul: RowMatmul, layer: Layer, index: int, x: Tensor) -> Tensor:
        """The outputs of one expert for rows x, without the expert's weight. As many rows come out."""
        padded = F.pad(x, (0, 0, 0, matmul.rows(len(x)) - len(x)))
        gate_up_bias, down_bias = (
            None if bias is None else bias[index] for bias in (layer.gate_up_bias, layer.down_bias)
        )
        gated = self._gate(matmul.linear(padded, layer.gate_up[index], gate_up_bias))
        return matmul.linear(gated, layer.down[index], down_bias)[: len(x)]

    def _outputs(self, matmul: RowMatmul, layer: Layer, rows: Tensor, experts_M: Tensor) -> Tensor:
        """Of each row what its expert makes of it. `experts_M` is sorted."""
        count = len(layer.gate_up)
        if self.grouped:
            ends = group_ends(experts_M, count)
            gate_up = _biased(grouped_linear(rows, layer.gate_up, ends), layer.gate_up_bias, experts_M)
            return _biased(grouped_linear(self._gate(gate_up), layer.down, ends), layer.down_bias, experts_M)
        counts = experts_M.bincount(minlength=count).tolist()
        by_expert = enumerate(rows.split(counts))
        return torch.cat([self.expert(matmul, layer, index, some) for index, some in by_expert if len(some)])


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
