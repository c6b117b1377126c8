"""The gated product of an MLP, activation(gate) * up, on a CPU.

The product is the input of the down projection. Both need it in the backward pass, and both compute it again
from `gate` and `up`. So two tensors of a layer are kept, where autograd keeps four.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
PARTS = "parts"  # attribute of a product
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class GateParts(NamedTuple):
    activation: Callable[[Tensor], Tensor]
    gate: Tensor
    up: Tensor

    def product(self) -> Tensor:
        return self.activation(self.gate) * self.up


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        gate = gate.detach().requires_grad_()
        with torch.enable_grad():
            active = ctx.activation(gate)
        (of_gate,) = torch.autograd.grad(active, gate, grads[0] * up)
        return None, of_gate, active.detach().mul_(grads[0])


def parts_of(x: Tensor) -> GateParts | None:
    """What `x` is a product of."""
    parts: GateParts | None = getattr(x, PARTS, None)
    return parts


def install(model: torch.nn.Module) -> None:
    """Give this product to the MLPs of `model` that have an activation and three projections."""
    for module in model.modules():
        if hasattr(module, "act_fn") and all(hasattr(module, name) for name in PROJECTIONS):
            module.forward = partial(_forward, module)


def _forward(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    product = _Product.apply(mlp.act_fn, gate, up)
    setattr(product, PARTS, GateParts(mlp.act_fn, gate.detach(), up.detach()))
    found: Tensor = mlp.down_proj(product)
    return found
