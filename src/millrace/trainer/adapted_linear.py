"""Adapters: thin matrices beside frozen weights. Only the adapter is trained, saved and published.

Replicas compute with the merged matrix of `low_rank.adapted`, rounded as published. The trainer does so too:
its log-probs are those of the policy that sampled. Each use makes the merged matrix anew, and it has no
gradient. The gradients of the thin matrices come from the layer's input and its output's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from millrace.config.tables.training import Adapter
from millrace.core.digest import XXH3, NamedBuffer, digest_buffers
from millrace.devices.low_rank import BASE, DOWN, KINDS, adapted, first_down, lengths, row_lengths
from millrace.trainer.model import named_weights
from millrace.trainer.ranks.blocks import OwnedBlock, copy_into, owned_blocks
from millrace.trainer.ranks.mesh import local


class AdaptedLinear(torch.nn.Linear):
    """A linear layer with a frozen weight and an adapter. `switched_on`: the adapter is used. `published`:
    the dtype that the merged matrix is rounded to."""

    def __init__(self, linear: torch.nn.Linear, config: Adapter, published: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        rank, scale, weight = config.rank, config.scale, linear.weight
        assert rank is not None and scale is not None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = weight, linear.bias
        self.scale, self.published, self.switched_on = scale, published, True
        self.lora_A = torch.nn.Parameter(weight.new_zeros(rank, self.in_features))
        self.lora_B = torch.nn.Parameter(weight.new_zeros(self.out_features, rank))
        dora = config.kind == "dora"
        self.lora_magnitude = torch.nn.Parameter(weight.new_zeros(self.out_features)) if dora else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.switched_on:
            return super().forward(x)
        cast_to = torch.is_autocast_enabled(x.device.type)
        computing = torch.get_autocast_dtype(x.device.type) if cast_to else x.dtype
        return cast(torch.Tensor, _AdaptedMatmul.apply(x, self, computing, self.bias, *self._tensors()))

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """The replicas' merged weight, before it is rounded. With several ranks a collective call."""
        tensors = (None if t is None else _gathered(t) for t in self._tensors())
        rounded = (None if t is None else t.to(self.published).to(t.dtype) for t in tensors)
        return cast(torch.Tensor, adapted(*rounded, scale=self.scale))

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.weight, self.lora_A, self.lora_B, self.lora_magnitude


class _AdaptedMatmul(torch.autograd.Function):
    """y = x W'^T + bias. G is the gradient of y, c the factor of each row (1 without `magnitude` m):

        dx = G W'    dB = scale (c G)^T (x A^T)    dA = scale (c G B)^T x    dm = sum_T G x W'^T / length

    As in DoRA, section 4.3, no gradient goes through the length of a row before the factor.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: AdaptedLinear, *given: Any) -> torch.Tensor:
        ctx.layer, (ctx.computing, bias, *tensors) = layer, given
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(x.to(ctx.computing), _rounded(ctx, *tensors))
            ctx.save_for_backward(x, *tensors, None if layer.lora_magnitude is None else y)
            return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, up, magnitude, y = ctx.saved_tensors
        (grad,), grad_x, of_magnitude, scale = grads, None, None, ctx.layer.scale
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ _rounded(ctx, weight, down, up, magnitude)).to(x.dtype)
        grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]).to(grad.dtype)
        if magnitude is not None:
            length_O = lengths(weight, magnitude)
            of_magnitude = (grad_TO * y.reshape(grad_TO.shape)).sum(0, dtype=magnitude.dtype) / length_O
            factor_O = length_O / row_lengths(adapted(weight, down, up, None, scale=scale))
            grad_TO = grad_TO * factor_O.to(grad.dtype)
        of_up = scale * (grad_TO.T @ (x_TI @ down.to(grad.dtype).T)).to(up.dtype)
        of_down = scale * ((grad_TO @ up.to(grad.dtype)).T @ x_TI).to(down.dtype)
        return grad_x, None, None, None, None, of_down, of_up, of_magnitude


def _rounded(ctx: Any, *tensors: torch.Tensor | None) -> torch.Tensor:
    """The merged matrix that replicas compute with."""
    merged: torch.Tensor = adapted(*tensors, scale=ctx.layer.scale)
    if ctx.layer.published != torch.float32:
        merged = merged.to(ctx.layer.published)
    return merged.to(ctx.computing)


def adapt(model: PreTrainedModel, config: Adapter, *, published: torch.dtype, seed: int) -> None:
    """Give `model` an adapter, and freeze everything else. See `insert` and `begin`."""
    insert(model, config, published)
    begin(model, published, seed)


def insert(model: PreTrainedModel, config: Adapter, published: torch.dtype) -> None:
    """Insert the layers of an adapter, without numbers: the model may have no memory yet.

    Raises: ConfigError: see `Adapter.layers`.
    """
    matrices = [name for name, weight in named_weights(model).items() if weight.ndim > 1]
    model.requires_grad_(False)
    for name in config.layers(name.removesuffix(".weight") for name in matrices):
        linear = cast(torch.nn.Linear, model.get_submodule(name))
        model.set_submodule(name, AdaptedLinear(linear, config, published))


def begin(model: PreTrainedModel, published: torch.dtype, seed: int) -> None:
    """Set the numbers of version 0. Frozen weights are rounded to `published`, as replicas have them. A is
    drawn from peft's distribution, by `seed` and the layer's name; B is 0. So version 0 is the model
    itself."""
    for name, parameter in model.named_parameters():
        block = local(parameter)
        parameter.requires_grad_(_end(name) in KINDS)
        block.copy_(block.to(published) if _end(name) not in KINDS else torch.zeros_like(block))
    for name, layer in adapted_layers(model).items():
        drawn = torch.from_numpy(first_down(name, tuple(layer.lora_A.shape), seed))
        copy_into(owned_blocks({DOWN: layer.lora_A}, copies=True), {DOWN: drawn})


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def adapted_layers(model: torch.nn.Module) -> dict[str, AdaptedLinear]:
    """The adapted layers by name. Empty: all weights are trained."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


@contextmanager
def switched_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block `model` computes without its adapter, as version 0."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.switched_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.switched_on = True


def base_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every weight but the adapter's."""
    adapters = trained_weights(model) if adapted_layers(model) else {}
    return {name: weight for name, weight in named_weights(model).items() if name not in adapters}


def merged_blocks(model: PreTrainedModel) -> Iterator[list[OwnedBlock]]:
    """The blocks of the merged model, one weight at a time."""
    layers = adapted_layers(model)
    for name, weight in base_weights(model).items():
        layer = layers.get(name.removesuffix(".weight"))
        yield owned_blocks({name: weight if layer is None else layer.merged()})


def trained_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights that the optimizer changes, by name: every weight, or the adapter's."""
    weights, trained = named_weights(model), dict(model.named_parameters())
    if not adapted_layers(model):
        return weights
    return {name: weight for name, weight in weights.items() if trained[name].requires_grad}


def published_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a version: every weight, or the adapter's and the digest of its base. With several ranks
    a collective call."""
    weights = trained_weights(model)
    if not adapted_layers(model):
        return weights
    base = dict(sorted(base_weights(model).items()))
    digits = [float(int(digit, 16)) for digit in digest_of(base, dtype)]
    return {**weights, BASE: torch.tensor(digits, device=model.device)}


def digest_of(weights: Mapping[str, torch.Tensor], dtype: torch.dtype, kind: str = XXH3) -> str:
    """The digest of whole tensors in their order, as `dtype`. With several ranks a collective call."""

    def as_buffer(name: str) -> NamedBuffer:
        tensor = _gathered(weights[name]).to("cpu", dtype).contiguous()
        data = tensor.view(-1).view(torch.uint8).numpy()
        return NamedBuffer(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), data)

    return digest_buffers(map(as_buffer, weights), kind)


def _gathered(tensor: Any) -> torch.Tensor:
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()
