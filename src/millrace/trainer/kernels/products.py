"""Linear layers of a trainer with whole weights: one rounded copy of every matrix for all rows of a step, and
on a GPU one matmul for all layers with the same input.

autocast rounds a matrix wherever a row uses it, and the gradient of each row. Here one call rounds all
matrices before the first row. On a GPU a matmul adds the gradient of a matrix to the sum over rows, in
float32. Layers in fp8 (`fp8_matmul`) have their copies here, too.

On a GPU the rounded copy of a matrix has its LoRA adapter in it. Base and adapter were rounded before
(`adapted_linear.begin`, `served_weights`), to the format that a GPU computes in. So their copies are exact,
and their sum is rounded once, as that of replicas. DoRA's layers compute as in `adapted_linear`.

Shape suffixes: T = tokens, I = inputs, O = outputs of all joined layers, R = ranks of all their adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.devices.low_rank import DOWN, MAGNITUDE
from millrace.devices.matmul import add_matmul, matmul_wide
from millrace.trainer.kernels.fp8_matmul import QUANTISE, Fp8Weight, fp8_weight

Tensor = torch.Tensor
Layers = Sequence[Any]  # of torch.nn.Linear
ROUNDED = "rounded"  # attribute of a layer that is not in fp8: its weight in the format of matmuls
JOINED = "joined"  # attribute of a layer, or of the first of several
SAME_INPUT = "same_input"  # attribute of a module: the names of its layers that are joined


class RoundedAdapter(NamedTuple):
    """The rounded B of a layer's adapter, and which outputs and ranks of the joined layers are its own."""

    layer: Any
    outputs: slice
    ranks: slice
    up: Tensor


class RoundedLayers(NamedTuple):
    """The rounded weights of `layers` as one matrix, and the rounded A of their adapters as another."""

    layers: Layers
    weight: Tensor | Fp8Weight  # (O, I)
    bias_O: Tensor | None
    down_RI: Tensor
    adapters: Sequence[RoundedAdapter]


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
    groups: list[Layers] = [layers for layers in named if layers and all(map(_is_rounded, layers))]
    inside = {layer for layers in groups for layer in layers}
    return groups + [[m] for m in model.modules() if _is_rounded(m) and m not in inside]


def _is_rounded(module: Any) -> bool:
    plain = type(module) is torch.nn.Linear or (hasattr(module, DOWN) and "forward" in vars(module))
    return plain and not isinstance(module.weight, DTensor)


def _outputs(layers: Layers) -> list[int]:
    return [layer.out_features for layer in layers]


def _unfilled(layers: Layers, dtype: torch.dtype) -> RoundedLayers:
    """Weights in fp8 are there at once."""
    weights, ranks, adapters = [layer.weight.detach() for layer in layers], 0, []
    new = partial(weights[0].new_empty, dtype=dtype)
    for layer, end in zip(layers, accumulate(_outputs(layers)), strict=True):
        if hasattr(layer, DOWN):
            outputs, own = slice(end - layer.out_features, end), slice(ranks, ranks + len(layer.lora_A))
            adapters.append(RoundedAdapter(layer, outputs, own, new(layer.lora_B.shape)))
            ranks = own.stop
    weight_OI, down_RI = (new((rows, layers[0].in_features)) for rows in (sum(_outputs(layers)), ranks))
    bias_O, weight = None if layers[0].bias is None else new(len(weight_OI)), weight_OI
    if (quantise := getattr(layers[0], QUANTISE, None)) is not None:
        weight = fp8_weight(torch.cat(weights, out=weight_OI), quantise)
    return RoundedLayers(layers, weight, bias_O, down_RI, adapters)


@torch.no_grad()
def _fill(joined: Sequence[RoundedLayers]) -> None:
    """All copies in one call. Then adapters are added to their matrices."""
    targets, sources = list[Tensor](), list[Tensor]()
    for layers, weight, bias_O, down_RI, adapters in joined:
        for whole, name in ((weight, "weight"), (bias_O, "bias")):
            if isinstance(whole, Tensor):
                targets += whole.split(_outputs(layers))
                sources += (getattr(layer, name) for layer in layers)
        for layer, _, ranks, up in adapters:
            targets += down_RI[ranks], up
            sources += layer.lora_A, layer.lora_B
    if targets:
        torch._foreach_copy_(targets, sources)
    for *_, down_RI, adapters in joined:
        for layer, _, ranks, up in adapters:
            layer.rounded.addmm_(up, down_RI[ranks], alpha=layer.scale)


class _Products(torch.autograd.Function):
    """x weight^T + bias of all layers, side by side. `parameters`: the weight of each layer, then the biases,
    then A and B of each adapter. The gradient of a matrix that has a sum is added to the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: RoundedLayers, *parameters: Tensor) -> Tensor:
        weight, bias_O = joined.weight, joined.bias_O
        x_TI = x.reshape(-1, x.shape[-1]).to(weight.dtype)
        ctx.joined, ctx.given = joined, (x.shape, x.dtype)
        ctx.save_for_backward(x_TI)
        if isinstance(weight, Tensor):
            y_TO = F.linear(x_TI, weight, bias_O)
        else:
            y_TO = weight.output(x_TI)
            y_TO = y_TO if bias_O is None else y_TO.add_(bias_O)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,), (shape, dtype), joined = ctx.saved_tensors, ctx.given, ctx.joined
        grad_TO, of_x, weight = grads[0].reshape(-1, grads[0].shape[-1]), None, joined.weight
        if ctx.needs_input_grad[0]:
            whole = isinstance(weight, Tensor)
            grad_TI = grad_TO @ weight if whole else weight.input_gradient(grad_TO)
            of_x = grad_TI.view(shape).to(dtype)
        outputs = _outputs(joined.layers)
        of_weights = [
            _matrix_gradient(layer.weight, block.t(), x_TI)
            for layer, block in zip(joined.layers, grad_TO.split(outputs, dim=1), strict=True)
        ]
        of_biases: Sequence[Tensor | None] = [] if joined.bias_O is None else [None] * len(outputs)
        if of_biases and joined.layers[0].bias.requires_grad:
            of_biases = grad_TO.sum(0, dtype=torch.float32).split(outputs)
        return of_x, None, *of_weights, *of_biases, *_adapter_gradients(joined, grad_TO, x_TI)


def _adapter_gradients(joined: RoundedLayers, grad_TO: Tensor, x_TI: Tensor) -> Iterator[Tensor | None]:
    """dA = scale (G B)^T x and dB = scale G^T (x A^T) of each adapter."""
    x_TR = x_TI @ joined.down_RI.t() if joined.adapters else x_TI
    for layer, outputs, ranks, up in joined.adapters:
        grad = grad_TO[:, outputs]
        yield _matrix_gradient(layer.lora_A, (grad @ up).t(), x_TI, layer.scale)
        yield _matrix_gradient(layer.lora_B, grad.t(), x_TR[:, ranks], layer.scale)


def _matrix_gradient(weight: Tensor, a_MT: Tensor, b_TN: Tensor, scale: float = 1.0) -> Tensor | None:
    """scale a b, if `weight` is trained and has no sum."""
    if not weight.requires_grad:
        return None
    if weight.grad is None:
        return scale * matmul_wide(a_MT, b_TN).to(weight.dtype)
    add_matmul(weight.grad, a_MT, b_TN, scale)
    return None


def _joined(layer: torch.nn.Linear) -> RoundedLayers | None:
    """None: `layer` computes by itself. Nothing is rounded, or adapters are switched off."""
    joined: RoundedLayers | None = getattr(layer, JOINED, None)
    return joined if joined and all(getattr(each, "switched_on", True) for each in joined.layers) else None


def linear_forward(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    joined = _joined(layer)
    alone = joined is not None and len(joined.layers) == 1
    return _multiplied(joined, x) if joined and alone else type(layer).forward(layer, x)


def install_linear(model: torch.nn.Module, forward: Callable[[Any, Tensor], Tensor] = linear_forward) -> None:
    """The linear layers of `model` compute with rounded copies, where `rounded_once` has made them. With
    `linear_forward` LoRA's layers do so, too."""
    for module in model.modules():
        lora = forward is linear_forward and getattr(module, MAGNITUDE, module) is None
        if type(module) is torch.nn.Linear or lora:
            module.forward = partial(forward, module)


def products(layers: Layers, x: Tensor) -> tuple[Tensor, ...]:
    """What `layers` make of `x`: their results side by side in one tensor if the layers are joined, else a
    tensor each."""
    joined = _joined(layers[0])
    if joined is None or len(joined.layers) < len(layers):
        return tuple(layer(x) for layer in layers)
    return (_multiplied(joined, x),)


def _multiplied(joined: RoundedLayers, x: Tensor) -> Tensor:
    biases = [] if joined.bias_O is None else [layer.bias for layer in joined.layers]
    weights = [layer.weight for layer in joined.layers]
    thin = [matrix for layer, *_ in joined.adapters for matrix in (layer.lora_A, layer.lora_B)]
    out: Tensor = _Products.apply(x, joined, *weights, *biases, *thin)
    return out
