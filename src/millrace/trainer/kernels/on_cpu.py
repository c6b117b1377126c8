"""Layers of a CPU with gradients of their own: linear layers, gated products, embeddings and RMSNorm.

Some linear layers compute with `devices.matmul`, also in the backward pass. The input of a down projection is
the gated product, activation(gate) * up. Both need it in the backward pass, and both compute it again from
`gate` and `up`. So two tensors of a layer are kept, where autograd keeps four. The gradient of an embedding
has a row for each token, and none for the rest of the vocabulary. That of RMSNorm (arXiv:1910.07467) is
explicit, in float32: half the passes of autograd's.

Shape suffixes: T = tokens, I = inputs, O = outputs, V = vocabulary, H = the normalized dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from millrace.devices.matmul import by_onednn, matmul
from millrace.trainer.kernels import fused_attention, products
from millrace.trainer.kernels.fp8_matmul import Fp8Weight
from millrace.trainer.kernels.products import JOINED
from millrace.trainer.kernels.row_threads import IN_TURN, turns_of

Tensor = torch.Tensor
PARTS = "parts"  # attribute of a product: its `GateParts`
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


def install_gate(model: torch.nn.Module) -> None:
    """Give this product to the MLPs of `model` that have an activation and three projections."""
    for module in model.modules():
        if hasattr(module, "act_fn") and all(hasattr(module, name) for name in PROJECTIONS):
            module.forward = partial(_gate_forward, module)


def _gate_forward(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    product = _Product.apply(mlp.act_fn, gate, up)
    setattr(product, PARTS, GateParts(mlp.act_fn, gate.detach(), up.detach()))
    found: Tensor = mlp.down_proj(product)
    return found


ROUNDED_INPUT = "rounded_input"  # attribute of a tensor


class _Linear(torch.autograd.Function):
    """x weight^T + bias. `factor`: the weight (O, I) in the format of the products and of the result, or in
    fp8. `parts`: what x was made of, if it is not to be kept. Layers with the same input share its rounded
    copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        factor: Tensor | Fp8Weight,
        parts: GateParts | None,
    ) -> Tensor:
        x_TI = getattr(x, ROUNDED_INPUT, None)
        if x_TI is None:
            x_TI = x.reshape(-1, x.shape[-1]).to(factor.dtype)
            if x_TI.dtype != x.dtype:  # a view, as an attribute of its base, would never be freed
                setattr(x, ROUNDED_INPUT, x_TI)
        ctx.fp8, factor_OI = (factor, None) if isinstance(factor, Fp8Weight) else (None, factor)
        ctx.save_for_backward(factor_OI, *((x_TI,) if parts is None else (parts.gate, parts.up)))
        ctx.activation = None if parts is None else parts.activation
        ctx.given = x.shape, x.dtype, weight_OI.dtype
        y_TO = ctx.fp8.output(x_TI) if factor_OI is None else matmul(x_TI, factor_OI.t())
        if bias_O is not None:
            y_TO += bias_O.to(y_TO.dtype)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor_OI, *kept = ctx.saved_tensors
        shape, dtype, weight_dtype = ctx.given
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_TO = grads[0].reshape(-1, grads[0].shape[-1])
        grad_weight = grad_x = None
        if of_weight:
            x = kept[0] if ctx.activation is None else GateParts(ctx.activation, *kept).product()
            grad_weight = _weight_gradient(grad_TO, x.reshape(-1, shape[-1]).to(grad_TO.dtype))
            grad_weight = grad_weight.to(weight_dtype)
        if of_x:
            grad_x = matmul(grad_TO, factor_OI) if ctx.fp8 is None else ctx.fp8.input_gradient(grad_TO)
            grad_x = grad_x.view(shape).to(dtype)
        grad_bias = grad_TO.sum(0, dtype=weight_dtype) if of_bias else None
        return grad_x, grad_weight, grad_bias, None, None


def _weight_gradient(grad_TO: Tensor, x_TI: Tensor) -> Tensor:
    """oneDNN is up to 1.4 times faster with fewer rows than columns."""
    if grad_TO.dtype == torch.float32 and grad_TO.shape[1] > x_TI.shape[1] and by_onednn():
        return matmul(x_TI.t(), grad_TO).t()
    return matmul(grad_TO.t(), x_TI)


def install_linear(model: torch.nn.Module) -> None:
    """The linear layers of `model` compute as is fastest. Layers of adapters do not."""
    products.install_linear(model, _linear_forward)


def _linear_forward(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    weight, parts, joined = layer.weight, getattr(x, PARTS, None), getattr(layer, JOINED, None)
    if joined is not None:
        factor = joined.weight
    elif fused_attention.computes_narrow(x):
        factor = weight.detach().to(torch.get_autocast_dtype("cpu"))
    elif x.dtype == torch.float32 and (by_onednn() or parts is not None):
        factor = weight.detach()
    else:
        return F.linear(x, weight, layer.bias)
    out: Tensor = _Linear.apply(x, weight, layer.bias, factor, parts)
    return out


SCALE = "embed_scale"  # of Gemma's embeddings


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VH: torch.nn.Parameter, padding: int | None) -> Tensor:
        ctx.ids, ctx.weight, ctx.padding = ids, weight_VH, padding
        return F.embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, ids, grad_TH = ctx.weight, ctx.ids.flatten(), grads[0].flatten(0, -2)
        if ctx.padding is not None:
            ids, grad_TH = ids[ids != ctx.padding], grad_TH[ids != ctx.padding]
        if (turns := turns_of(weight_VH)) is not None:
            turns.later(lambda: weight_VH.grad.index_add_(0, ids, grad_TH))
            return None, None, None
        return None, torch.zeros_like(weight_VH).index_add_(0, ids, grad_TH), None


def install_lookup(model: PreTrainedModel) -> None:
    """Give this gradient to the embedding of `model`. The output projection then adds to sums itself, because
    both gradients of a tied weight have to be added in a fixed order."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    known = type(embedding) is torch.nn.Embedding or hasattr(embedding, SCALE)
    if known:
        embedding.forward = partial(_lookup_forward, embedding)
        setattr(embedding.weight, IN_TURN, True)
    if head.weight is not embedding.weight:
        setattr(head.weight, IN_TURN, True)


def _lookup_forward(layer: torch.nn.Embedding, ids: Tensor) -> Tensor:
    out: Tensor = _Lookup.apply(ids, layer.weight, layer.padding_idx)
    scale = getattr(layer, SCALE, None)
    return out if scale is None else out * scale.to(out.dtype)


WEIGHT_MIN = 1e-10
"""A sparing norm all of whose weights are larger keeps its output, which the next layer keeps too, and
divides."""


class _RMSNorm(torch.autograd.Function):
    """y = w n,   n = r x,   r = 1 / sqrt(mean(x^2) + epsilon)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float, sparing: bool) -> Tensor:
        r = x.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        n = x * r
        y = weight_H * n
        ctx.divides = sparing and bool((weight_H.abs() > WEIGHT_MIN).all())
        ctx.save_for_backward(y if ctx.divides else n, r, weight_H)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, r, weight_H = ctx.saved_tensors
        n = kept / weight_H if ctx.divides else kept
        of_weight = grads[0] * n
        along = (of_weight @ weight_H).div_(-len(weight_H))[..., None]
        of_x = (grads[0] * weight_H).addcmul_(n, along).mul_(r)  # dx = r (w dy - n mean(w n dy))
        return of_x, of_weight.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None


def install_norm(model: torch.nn.Module, *, sparing: bool = True) -> None:
    """Give this gradient to the norms of `model` if they are Llama's. Gemma's norms differ. `sparing`: with
    less memory, in more time."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm_forward, module, sparing)


def _norm_forward(norm: Any, sparing: bool, x: Tensor) -> Tensor:
    out: Tensor
    if x.dtype == norm.weight.dtype == torch.float32:
        out = _RMSNorm.apply(x, norm.weight, norm.variance_epsilon, sparing)
    else:
        out = type(norm).forward(norm, x)
    return out
