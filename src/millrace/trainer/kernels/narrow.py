"""Attention by torch's fused kernels, and what a CPU that computes matmuls in bfloat16 rounds when. Less is
kept for the backward pass than autocast keeps, and attention takes less time.

Shape suffixes: R = segments, H = heads, Q = queries, K = keys, D = head dimension.
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


def attention(query_R: Tensor, key_R: Tensor, value_R: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of (R, H, Q, D) to (R, H_kv, K, D), plain causal without a mask. Autocast on a CPU rounds
    queries, keys, values and the result; scores and sums are then float32."""
    if not computes_narrow(query_R):
        return _attend(query_R, key_R, value_R, mask, scaling)
    dtype = torch.get_autocast_dtype("cpu")
    out: Tensor = _Attention.apply(query_R.to(dtype), key_R.to(dtype), value_R.to(dtype), mask, scaling)
    return out


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
