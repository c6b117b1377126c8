"""Linear layers of a trainer with whole weights: one rounded copy of every matrix for all rows of a step, and
on a GPU one matmul for all layers with the same input.

autocast rounds a matrix wherever a row uses it, and the gradient of each row. Here one call rounds all
matrices before the first row. On a GPU a matmul adds the gradient of a matrix to the sum over rows, in
float32. Layers in fp8 (`fp8_matmul`) have their copies here, too.

Shape suffixes: T = tokens, I = inputs, O = outputs of all joined layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.devices.matmul import add_matmul, matmul_wide
from millrace.trainer.kernels.fp8_matmul import QUANTISE, Fp8Weight, fp8_weight

Tensor = torch.Tensor
Layers = Sequence[torch.nn.Linear]
ROUNDED = "rounded"  # attribute of a layer that is not in fp8: its weight in the format of matmuls
JOINED = "joined"  # attribute of a layer, or of the first of several
SAME_INPUT = "same_input"  # attribute of a module: the names of its layers that are joined


class RoundedLayers(NamedTuple):
    """The rounded weights of `layers` as one matrix."""

    layers: Layers
    weight: Tensor | Fp8Weight  # (O, I)
    bias_O: Tensor | None


@contextmanager
def rounded_once(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the linear layers and the output projection of `model` share one rounded copy of their weights
    among all rows and both passes. The weights must not change inside. Ranks round what they gather."""
    narrow = dtype.itemsize < 4
    groups = [layers for layers in _groups(model) if narrow or hasattr(layers[0], QUANTISE)]
    joined = [_unfilled(layers, dtype) for layers in groups]
    for each in joined:
        setattr(each.layers[0], JOINED, each)
        if isinstance(each.weight, Tensor):
            for layer, block in zip(each.layers, each.weight.split(_outputs(each.layers)), strict=True):
                setattr(layer, ROUNDED, block)
    _fill(joined)
    try:
        yield
    finally:
        for layers in groups:
            delattr(layers[0], JOINED)
            for layer in layers:
                vars(layer).pop(ROUNDED, None)


def _groups(model: torch.nn.Module) -> list[Layers]:
    """The layers that are joined, and each other layer alone."""
    named = ([getattr(m, name) for name in getattr(m, SAME_INPUT, ())] for m in model.modules())
    groups: list[Layers] = [layers for layers in named if layers and all(map(_is_plain, layers))]
    inside = {layer for layers in groups for layer in layers}
    return groups + [[m] for m in model.modules() if _is_plain(m) and m not in inside]  # type: ignore[list-item]


def _is_plain(module: Any) -> bool:
    return type(module) is torch.nn.Linear and not isinstance(module.weight, DTensor)


def _outputs(layers: Layers) -> list[int]:
    return [layer.out_features for layer in layers]


def _unfilled(layers: Layers, dtype: torch.dtype) -> RoundedLayers:
    """Weights in fp8 are there at once."""
    outputs, weights = sum(_outputs(layers)), [layer.weight.detach() for layer in layers]
    bias_O = None if layers[0].bias is None else weights[0].new_empty(outputs, dtype=dtype)
    weight_OI = weights[0].new_empty((outputs, layers[0].in_features), dtype=dtype)
    if (quantise := getattr(layers[0], QUANTISE, None)) is not None:
        return RoundedLayers(layers, fp8_weight(torch.cat(weights, out=weight_OI), quantise), bias_O)
    return RoundedLayers(layers, weight_OI, bias_O)


@torch.no_grad()
def _fill(joined: Sequence[RoundedLayers]) -> None:
    """All copies in one call."""
    targets, sources = list[Tensor](), list[Tensor]()
    for layers, weight, bias_O in joined:
        for whole, name in ((weight, "weight"), (bias_O, "bias")):
            if isinstance(whole, Tensor):
                targets += whole.split(_outputs(layers))
                sources += (getattr(layer, name) for layer in layers)
    if targets:
        torch._foreach_copy_(targets, sources)


class _Products(torch.autograd.Function):
    """x weight^T + bias of all layers, side by side. `parameters`: the weight of each layer, then the biases.
    The gradient of a weight that has a sum is added to the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: RoundedLayers, *parameters: Tensor) -> Tensor:
        weight = joined.weight
        x_TI = x.reshape(-1, x.shape[-1]).to(weight.dtype)
        ctx.layers, ctx.given = joined.layers, (x.shape, x.dtype)
        if isinstance(weight, Fp8Weight):
            ctx.fp8 = weight
            ctx.save_for_backward(x_TI, None)
            y_TO = weight.output(x_TI)
            y_TO = y_TO if joined.bias_O is None else y_TO.add_(joined.bias_O)
        else:
            ctx.save_for_backward(x_TI, weight)
            y_TO = F.linear(x_TI, weight, joined.bias_O)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        shape, dtype = ctx.given
        grad_TO, of_x = grads[0].reshape(-1, grads[0].shape[-1]), None
        if ctx.needs_input_grad[0]:
            grad_TI = ctx.fp8.input_gradient(grad_TO) if weight_OI is None else grad_TO @ weight_OI
            of_x = grad_TI.view(shape).to(dtype)
        blocks = grad_TO.split(_outputs(ctx.layers), dim=1)
        of_weights = [
            _weight_gradient(layer.weight, block, x_TI)
            for layer, block in zip(ctx.layers, blocks, strict=True)
        ]
        biases = ctx.needs_input_grad[2 + len(blocks) :]
        of_biases: Sequence[Tensor | None] = [None] * len(biases)
        if any(biases):
            of_biases = grad_TO.sum(0, dtype=torch.float32).split(_outputs(ctx.layers))
        return of_x, None, *of_weights, *of_biases


def _weight_gradient(weight: Tensor, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    if not weight.requires_grad:
        return None
    if weight.grad is None:
        return matmul_wide(grad_TO.t(), x_TI).to(weight.dtype)
    add_matmul(weight.grad, grad_TO.t(), x_TI)
    return None


def linear_forward(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    joined: RoundedLayers | None = getattr(layer, JOINED, None)
    alone = joined is not None and len(joined.layers) == 1
    return _multiplied(joined, x) if joined and alone else F.linear(x, layer.weight, layer.bias)


def install_linear(
    model: torch.nn.Module, forward: Callable[[torch.nn.Linear, Tensor], Tensor] = linear_forward
) -> None:
    """The linear layers of `model` compute with rounded copies, where `rounded_once` has made them."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(forward, module)  # type: ignore[method-assign]


def products(layers: Layers, x: Tensor) -> tuple[Tensor, ...]:
    """What `layers` make of `x`: their results side by side in one tensor if the layers are joined, else a
    tensor each."""
    joined: RoundedLayers | None = getattr(layers[0], JOINED, None)
    if joined is None or len(joined.layers) < len(layers):
        return tuple(layer(x) for layer in layers)
    return (_multiplied(joined, x),)


def _multiplied(joined: RoundedLayers, x: Tensor) -> Tensor:
    biases = [] if joined.bias_O is None else [layer.bias for layer in joined.layers]
    weights = [layer.weight for layer in joined.layers]
    out: Tensor = _Products.apply(x, joined, *weights, *biases)
    return out
