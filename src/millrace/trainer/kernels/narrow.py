"""Attention by torch's fused kernels, and linear layers and attention of a CPU that computes matmuls in
bfloat16. These two keep less for the backward pass than autocast does, and attention takes less time.

Shape suffixes: T = tokens, I = inputs, O = outputs, R = segments, H = heads, Q = queries, K = keys, D = head
dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Tensor = torch.Tensor


def computes_narrow(x: Tensor) -> bool:
    """Whether matmuls of `x` are rounded, by autocast on a CPU."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x weight^T + bias, with factors and result in autocast's format."""
    out: Tensor = _Linear.apply(x, weight_OI, bias_O, torch.get_autocast_dtype("cpu"))
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
    """A rounded copy of the weight is made twice, and is never kept between the passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1]).to(dtype)
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.given = x.shape, x.dtype
        y_TO = x_TI @ weight_OI.to(dtype).t()
        if bias_O is not None:
            y_TO += bias_O.to(dtype)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        shape, dtype = ctx.given
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        grad_TO = grads[0].reshape(-1, len(weight_OI))
        return (
            (grad_TO @ weight_OI.to(grad_TO.dtype)).view(shape).to(dtype) if of_x else None,
            (grad_TO.t() @ x_TI).to(weight_OI.dtype) if of_weight else None,
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
