"""Gates: from the outputs of gate and up projections, (M, 2 I), to (M, I)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from millrace.engines.own.architecture import Architecture

Tensor = torch.Tensor
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
