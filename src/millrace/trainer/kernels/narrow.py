"""Attention by torch's fused kernels, and linear layers and attention of a CPU that computes matmuls in
bfloat16. These two keep less for the backward pass than autocast does, and attention takes less time.

Shape suffixes: T = tokens, I = inputs, O = outputs, R = segments, H = heads, Q = queries, K = keys, D = head
dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

Tensor = torch.Tensor
ROUNDED = "rounded"  # attribute of a layer


def computes_narrow(x: Tensor) -> bool:
    """Whether matmuls of `x` are rounded, by autocast on a CPU."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


@contextmanager
def rounded_once(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the linear layers and the output projection of `model` share one rounded copy of their weights
    among all rows and both passes. The weights must not change inside. Ranks round what they gather."""
    layers = [
        module
        for module in model.modules()
        if type(module) is torch.nn.Linear and not isinstance(module.weight, DTensor)
    ]
    rounds = dtype.itemsize < 4 and model.device.type == "cpu"
    for layer in layers if rounds else ():
        setattr(layer, ROUNDED, layer.weight.detach().to(dtype))
    try:
        yield
    finally:
        for layer in layers if rounds else ():
            delattr(layer, ROUNDED)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rounded_OI: Tensor | None = None) -> Tensor:
    """x weight^T + bias, with factors and result in autocast's format. `rounded_OI`: the weight in it."""
    dtype = torch.get_autocast_dtype("cpu")
    if rounded_OI is None:
        rounded_OI = weight_OI.detach().to(dtype)
    out: Tensor = _Linear.apply(x, weight_OI, bias_O, rounded_OI)
    return out


def attention(query_R: Tensor, key_R: Tensor, value_R: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of (R, H, Q, D) to (R, H_kv, K, D), plain causal without a mask. Autocast on a CPU rounds
    queries, keys, values and the result; scores and sums are then float32."""
    if not computes_narrow(query_R):
        return _attend(query_R, key_R, value_R, mask, scaling)
    dtype = torch.get_autocast_dtype("cpu")
    out: Tensor = _Attention.apply(query_R.to(dtype), key_R.to(dtype), value_R.to(dtype), mask, scaling)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rounded_OI: Tensor) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1]).to(rounded_OI.dtype)
        ctx.save_for_backward(x_TI, rounded_OI)
        ctx.given = x.shape, x.dtype, weight_OI.dtype
        y_TO = x_TI @ rounded_OI.t()
        if bias_O is not None:
            y_TO += bias_O.to(y_TO.dtype)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, rounded_OI = ctx.saved_tensors
        shape, dtype, weight_dtype = ctx.given
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        grad_TO = grads[0].reshape(-1, len(rounded_OI))
        return (
            (grad_TO @ rounded_OI).view(shape).to(dtype) if of_x else None,
            (grad_TO.t() @ x_TI).to(weight_dtype) if of_weight else None,
            grad_TO.sum(0, dtype=torch.float32) if of_bias else None,
            None,
        )


class _Attention(torch.autograd.Function):
    """In float32, because torch's backward pass takes four times as long in bfloat16. It is computed again in
    the backward pass, so that float32 copies are not kept."""

    @staticmethod
    def forward(
        ctx: Any, query_R: Tensor, key_R: Tensor, value_R: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(query_R, key_R, value_R, mask)
        ctx.scaling = scaling
        with torch.autocast("cpu", enabled=False):
            return _attend(query_R.float(), key_R.float(), value_R.float(), mask, scaling).to(query_R.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *narrow, mask = ctx.saved_tensors
        query_R, key_R, value_R = wide = [x.float().requires_grad_() for x in narrow]
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            out = _attend(query_R, key_R, value_R, mask, ctx.scaling)
        slopes = torch.autograd.grad(out, wide, grads[0].float())
        return *(slope.to(x.dtype) for slope, x in zip(slopes, narrow, strict=True)), None, None


def _attend(query_R: Tensor, key_R: Tensor, value_R: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    grouped = key_R.shape[1] != query_R.shape[1]
    return scaled_dot_product_attention(
        query_R, key_R, value_R, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
