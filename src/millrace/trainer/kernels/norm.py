"""RMSNorm (arXiv:1910.07467) in float32 with an explicit gradient, in half the passes of autograd's.

Shape suffixes: H = the normalized dimension. There is any number of other dimensions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

WEIGHT_MIN = 1e-10
"""A norm all of whose weights are larger keeps its output, which the next layer keeps too, and divides."""


class _RMSNorm(torch.autograd.Function):
    """y = w n,   n = r x,   r = 1 / sqrt(mean(x^2) + epsilon)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
        r = x.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        n = x * r
        y = weight_H * n
        ctx.divides = bool((weight_H.abs() > WEIGHT_MIN).all())
        ctx.save_for_backward(y if ctx.divides else n, r, weight_H)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, r, weight_H = ctx.saved_tensors
        n = kept / weight_H if ctx.divides else kept
        of_weight = grads[0] * n
        along = (of_weight @ weight_H).div_(-len(weight_H))[..., None]
        of_x = (grads[0] * weight_H).addcmul_(n, along).mul_(r)  # dx = r (w dy - n mean(w n dy))
        return of_x, of_weight.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None


def install(model: torch.nn.Module) -> None:
    """Give this gradient to the norms of `model` if they are Llama's. Gemma's norms differ."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(_forward, module)


def _forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
    single = x.dtype == norm.weight.dtype == torch.float32
    out: torch.Tensor = (
        _RMSNorm.apply(x, norm.weight, norm.variance_epsilon) if single else type(norm).forward(norm, x)
    )
    return out
