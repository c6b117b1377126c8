"""Linear layers of a trainer in fp8 (`trainer.quantization`): outputs, and gradients of inputs.

Numbers are float8_e4m3fn. Each row of both factors has a float32 scale, its largest magnitude over 448:

    y_TO = s_T s_O sum_I x_TI w_OI    dx_TI = s_T s_I sum_O g_TO w_OI

A weight is rounded as it is published, and then quantised twice for all rows of a step: with a scale for each
output, and with one for each input. Both copies together take the memory of one in bfloat16.

Gradients of weights are computed as without fp8. They are sums over all tokens of a step, and Adam sums them
over steps. There, errors of 3 % that have a bias would add up. Also, their sums are over tokens, so `x` and
`g` would need a second copy each, with scales of columns.

torchao's recipe `rowwise_with_gw_hp` is this mix, with one scale for a whole weight in dx. It is not used: it
replaces layers, quantises a weight again for each row of a step, and keeps layers with one input apart.
vLLM's scheme (`rollout.quantization`) has the same numbers forward, but for rows below 1/512.

Shape suffixes: T = tokens, I = inputs, O = outputs of all joined layers, M, K, N of a matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from transformers import PreTrainedModel

from millrace.core.errors import ConfigError

Tensor = torch.Tensor
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
SCALE_MIN = torch.finfo(torch.float32).tiny  # of a row of zeros. Gradients may be small, so no larger one
QUANTISE = "quantise"  # attribute of a layer in fp8: what quantises its factors
ALIGNED = 16  # a GPU multiplies fp8 matrices of such sizes
DESCRIPTION = ", matrices of layers in fp8 (weights by channel, inputs by token)"


def quantised(rows_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of fp8, row after row, and the scale of each row, (M, 1) float32.

    Degenerate:
        zeros -> zeros. NaN or infinity -> the row has a NaN and so has its product, as without fp8.
    """
    largest_M1 = torch.linalg.vector_norm(rows_MK, torch.inf, -1, keepdim=True, dtype=torch.float32)
    scale_M1 = (largest_M1 / FP8_MAX).clamp_min(SCALE_MIN)
    return (rows_MK / scale_M1).to(FP8, memory_format=torch.contiguous_format), scale_M1


@dataclass(frozen=True)
class Fp8Weight:
    """A weight as both passes read it. `dtype`: of inputs and results."""

    rows_OI: Tensor
    scale_O1: Tensor
    rows_IO: Tensor
    scale_I1: Tensor
    dtype: torch.dtype
    quantise: Quantise

    def output(self, x_TI: Tensor) -> Tensor:
        return _matmul(*self.quantise(x_TI), self.rows_OI, self.scale_O1, self.dtype)

    def input_gradient(self, grad_TO: Tensor) -> Tensor:
        return _matmul(*self.quantise(grad_TO), self.rows_IO, self.scale_I1, self.dtype)


def fp8_weight(weight_OI: Tensor, quantise: Quantise) -> Fp8Weight:
    of_outputs, of_inputs = quantised(weight_OI), quantised(weight_OI.t())
    return Fp8Weight(*of_outputs, *of_inputs, dtype=weight_OI.dtype, quantise=quantise)


def _matmul(a_MK: Tensor, scale_M1: Tensor, b_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, N): a b^T with their scales. Sums are float32: the faster ones of a GPU have fewer bits."""
    if not why_no_kernel(a_MK.device):
        return torch._scaled_mm(a_MK, b_NK.t(), scale_a=scale_M1, scale_b=scale_N1.t(), out_dtype=dtype)
    return (a_MK.float() @ b_NK.float().t() * scale_M1 * scale_N1.t()).to(dtype)


@cache
def why_no_kernel(device: torch.device) -> str:
    """Why torch has no such matmul there; empty: it has."""
    factor, scale = torch.ones((ALIGNED, ALIGNED), device=device), torch.ones((ALIGNED, 1), device=device)
    try:
        torch._scaled_mm(
            factor.to(FP8), factor.to(FP8).t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16
        )
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return ""


def quantise_layers(model: PreTrainedModel, device: torch.device) -> None:
    """The linear layers of the decoder compute in fp8 inside `rounded_once`. Embedding and head do not.

    Raises: ConfigError: a GPU cannot. A CPU without the matmul computes the same numbers from float32.
    """
    layers = {
        name: module
        for name, module in model.base_model.layers.named_modules()
        if type(module) is torch.nn.Linear
    }
    if device.type != "cpu":
        why = why_no_kernel(device)
        for name, layer in layers.items():
            rows, columns = layer.weight.shape
            if rows % ALIGNED or columns % ALIGNED:
                why = why or f"{name} is {rows} x {columns}, and both must be multiples of {ALIGNED}"
        if why:
            raise ConfigError(
                f'`trainer.quantization` ("fp8"): {device} cannot multiply these matrices in fp8: {why}\n'
                "  It needs compute capability 8.9 or more (Ada, Hopper). Leave the key out"
            )
    for layer in layers.values():
        setattr(layer, QUANTISE, quantised)
