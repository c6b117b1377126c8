"""What vLLM's `fp8_per_channel` does to a model, done to the plain model: the proof expects its log-probs.

vLLM rounds the matrices of layers to fp8 with a scale for each row, and each input of a matrix with a scale
for its token. A scale takes the largest number to the largest of fp8. Embedding, head and norms stay.
"""

from __future__ import annotations

from functools import partial

import torch

FP8_MAX = 448.0
_SCALE_MIN = 1 / (FP8_MAX * 512)  # vLLM's
_ROWS = 128  # are rounded at a time, and stay in the cache of a CPU


def quantise(model: torch.nn.Module) -> None:
    """From now on each pass of `model` rounds the matrices of its layers, and their inputs. Weights stay."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.forward = partial(_rounded_linear, module)  # type: ignore[method-assign]


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of fp8 in the format of `rows`, and the scale of each row in float32.

    Shapes: rows (..., columns) -> (..., columns), (..., 1)"""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(_SCALE_MIN)
    return (wide / scale).to(torch.float8_e4m3fn).to(rows.dtype), scale


def _rounded_linear(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    numbers, token_scale = _quantised(inputs)
    parts = []
    for rows in layer.weight.split(_ROWS):
        matrix, row_scale = _quantised(rows)
        parts.append(torch.nn.functional.linear(numbers, matrix) * row_scale.T)
    outputs = torch.cat(parts, -1) * token_scale
    return (outputs if layer.bias is None else outputs + layer.bias).to(inputs.dtype)
