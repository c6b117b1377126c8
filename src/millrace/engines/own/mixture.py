"""Mixtures of experts, and the gates of experts and dense layers.

Shape suffixes: M pairs of a row and its expert, sorted by expert, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from millrace.devices.matmul import group_ends, grouped_linear, has_grouped
from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.parameters import Layer

Tensor = torch.Tensor


class Routed(NamedTuple):
    """What the experts of rows gave.

    outputs, biases  (pairs of a row and its expert, hidden), sorted by expert, and what has to be added to
                     those of each expert
    places           of each pair among `outputs`
    experts, shares  (rows, experts of a row)
    """

    outputs: Tensor
    biases: Tensor | None
    places: Tensor
    experts: Tensor
    shares: Tensor


class ExpertMixture:
    """The experts of an architecture. `grouped`: all of a layer are computed in grouped matmuls. `choose`,
    `sort` and `gate`, of groups, may be exchanged for kernels."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._routed, self._sum_1 = architecture.routed, architecture.routed_sum_1
        self._activation = architecture.activation, architecture.clamp
        self._gate = gate_of(*self._activation)
        self.choose, self.sort, self.gate = chosen, by_expert, gated_rows
        experts = (shape for name, shape in architecture.shapes.items() if ".experts." in name)
        self.grouped = architecture.routed > 0 and has_grouped(device, dtype, experts)

    def __call__(
        self, matmul: RowMatmul, layer: Layer, router: Tensor, x: Tensor, routing: Tensor | None
    ) -> Routed:
        """The experts of rows are written to `routing`. Rows are sorted by expert, and each expert computes
        its rows. Without `grouped` the host waits for a GPU once: for the number of rows of each expert."""
        logits = matmul.linear(x, router, layer.router_bias)
        shares, experts = self.choose(logits, self._routed, self._sum_1)
        if routing is not None:
            routing[: len(x)] = experts
        rows_M, experts_M, places, ends = self.sort(experts, len(layer.gate_up))
        outputs = self._outputs(matmul, layer, x[rows_M], experts_M, ends)
        return Routed(outputs, layer.down_bias if self.grouped else None, places, experts, shares)

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
        """Of each row what its expert makes of it, in groups without its bias. See `by_expert`."""
        if self.grouped:
            gate_up = grouped_linear(rows, layer.gate_up, ends)
            gated = self.gate(gate_up, layer.gate_up_bias, experts_M, *self._activation)
            return grouped_linear(gated, layer.down, ends)
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


def gated_rows(
    gate_up_MI: Tensor,
    biases: Tensor | None,
    experts_M: Tensor,
    activation: str,
    clamp: Sequence[float] | None,
) -> Tensor:
    """As `gate_of`, of rows to which the biases of their experts are added first."""
    return gate_of(activation, clamp)(_biased(gate_up_MI, biases, experts_M))


def summed(outputs: Tensor, biases: Tensor | None, places: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    """The weighted sum of each row's experts, of the parts of a `Routed`."""
    by_row = _biased(outputs[places], biases, experts).view(*shares.shape, -1)
    return (by_row * shares[:, :, None].to(outputs.dtype)).sum(dim=1)


def _biased(x: Tensor, biases: Tensor | None, experts: Tensor) -> Tensor:
    return x if biases is None else x + biases[experts.flatten()]


Gate = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Gate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations by their names in transformers."""


def gate_of(activation: str, clamp: Sequence[float] | None) -> Gate:
    return partial(gated, ACTIVATIONS[activation]) if clamp is None else partial(clamped, clamp[0], clamp[1])


def gated(activation: Gate, gate_up: Tensor) -> Tensor:
    """activation(gate) up. The first half of the columns is the gate."""
    gate, up = gate_up.chunk(2, dim=1)
    return activation(gate).mul_(up)


def clamped(alpha: float, limit: float, gate_up: Tensor) -> Tensor:
    """gate sigmoid(alpha gate) (up + 1), of values that are cut at `limit`; the gate is not cut below. Every
    second column is the gate: gpt-oss, arXiv:2508.10925."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate)).mul_(up.add_(1))
