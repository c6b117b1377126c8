"""Linear layers of a CPU. Some compute with `devices.matmul`, also in the backward pass. The input of a down
projection is not kept for its backward pass: `gate` computes it again.

Shape suffixes: T = tokens, I = inputs, O = outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from millrace.devices.matmul import by_onednn, matmul
from millrace.trainer.kernels import gate, narrow

Tensor = torch.Tensor


ROUNDED_INPUT = "rounded_input"  # attribute of a tensor


class _Linear(torch.autograd.Function):
    """x weight^T + bias. `factor_OI`: the weight in the format of the products and of the result. `parts`:
    what x was made of, if it is not to be kept. Layers with the same input share its rounded copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        factor_OI: Tensor,
        parts: gate.GateParts | None,
    ) -> Tensor:
        x_TI = getattr(x, ROUNDED_INPUT, None)
        if x_TI is None:
            x_TI = x.reshape(-1, x.shape[-1]).to(factor_OI.dtype)
            if x_TI.dtype != x.dtype:  # a view, as an attribute of its base, would never be freed
                setattr(x, ROUNDED_INPUT, x_TI)
        ctx.save_for_backward(factor_OI, *((x_TI,) if parts is None else (parts.gate, parts.up)))
        ctx.activation = None if parts is None else parts.activation
        ctx.given = x.shape, x.dtype, weight_OI.dtype
        y_TO = matmul(x_TI, factor_OI.t())
        if bias_O is not None:
            y_TO += bias_O.to(y_TO.dtype)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor_OI, *kept = ctx.saved_tensors
        shape, dtype, weight_dtype = ctx.given
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_TO = grads[0].reshape(-1, len(factor_OI))
        grad_weight = None
        if of_weight:
            x = kept[0] if ctx.activation is None else gate.GateParts(ctx.activation, *kept).product()
            grad_weight = _weight_gradient(grad_TO, x.reshape(-1, shape[-1]).to(factor_OI.dtype))
        return (
            matmul(grad_TO, factor_OI).view(shape).to(dtype) if of_x else None,
            None if grad_weight is None else grad_weight.to(weight_dtype),
            grad_TO.sum(0, dtype=weight_dtype) if of_bias else None,
            None,
            None,
        )


def _weight_gradient(grad_TO: Tensor, x_TI: Tensor) -> Tensor:
    """oneDNN is up to 1.4 times faster with fewer rows than columns."""
    if grad_TO.dtype == torch.float32 and grad_TO.shape[1] > x_TI.shape[1] and by_onednn():
        return matmul(x_TI.t(), grad_TO).t()
    return matmul(grad_TO.t(), x_TI)


def install(model: torch.nn.Module) -> None:
    """The linear layers of `model` compute as is fastest. Layers of adapters do not."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    weight, parts = layer.weight, gate.parts_of(x)
    if narrow.computes_narrow(x):
        factor = getattr(layer, narrow.ROUNDED, None)
        if factor is None:
            factor = weight.detach().to(torch.get_autocast_dtype("cpu"))
    elif x.dtype == torch.float32 and (by_onednn() or parts is not None):
        factor = weight.detach()
    else:
        return F.linear(x, weight, layer.bias)
    out: Tensor = _Linear.apply(x, weight, layer.bias, factor, parts)
    return out
