"""Weights in mxfp4, as gpt-oss is published, in bfloat16.

A number has 4 bits: a sign, two bits of exponent, one of mantissa. 32 numbers share a power of two. Source:
OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.

Shape suffixes: E experts, O outputs, G groups of 32 inputs, I = 32 G inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from millrace.core.errors import DataError
from millrace.core.supported import MXFP4, TRAINER
from millrace.placement.model_directory import indexed_files, read_model_config
from millrace.trainer.files.rewritten import Tensors, rewrite

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCKS, SCALES = "_blocks", "_scales"
BIAS, NAN = 127, 255  # of a scale, a power of two


def dequantize(model: Path, out: Path) -> None:
    """Write `model` to `out` with its mxfp4 weights in bfloat16, four times as many bytes.

    Raises: DataError: `model` has no mxfp4 weights, is of a family that the trainer does not run, or lacks a
    scale.
    """
    config = read_model_config(model)
    method = (config.pop("quantization_config", None) or {}).get("quant_method")
    if method != MXFP4:
        raise DataError(f"{model} has no {MXFP4} weights: its config.json says {method!r}")
    if config.get("model_type") not in TRAINER.families:
        raise DataError(f"{model}: the trainer does not run the family {config.get('model_type')!r}")
    files = indexed_files(model) or sorted(model.glob("*.safetensors"))

    def tensors(file: Path) -> Tensors:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name.endswith(BLOCKS):
                    stem = name.removesuffix(BLOCKS)
                    scales = _read(files, stem + SCALES)
                    yield stem, dequantized(opened.get_tensor(name), scales)
                elif not name.endswith(SCALES):
                    yield name, opened.get_tensor(name)

    rewrite(model, out, config | {"dtype": "bfloat16"}, tensors)


def dequantized(blocks_EOGB: torch.Tensor, scales_EOG: torch.Tensor) -> torch.Tensor:
    """(E, I, O) bfloat16: the weights, transposed as gpt-oss has them.

    Shapes:
        blocks_EOGB  (E, O, G, 16) uint8, two numbers each, the first in the low bits
        scales_EOG   (E, O, G) uint8, exponents of two plus 127
    Raises: DataError: a scale is not a number.
    """
    if (scales_EOG == NAN).any():
        raise DataError("a scale of the mxfp4 weights is not a number: the file is damaged")
    values = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    experts, outputs, groups, _ = blocks_EOGB.shape
    weights = torch.empty((experts, 32 * groups, outputs), dtype=torch.bfloat16)
    for weight_IO, blocks_OGB, scales_OG in zip(weights, blocks_EOGB, scales_EOG, strict=True):
        numbers = values[torch.stack([blocks_OGB & 15, blocks_OGB >> 4], dim=-1).int()]
        scaled = torch.ldexp(numbers.flatten(2), scales_OG[..., None].int() - BIAS)
        weight_IO.copy_(scaled.flatten(1).T)
    return weights


def _read(files: list[Path], name: str) -> Any:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118 (not a dict)
                return opened.get_tensor(name)
    raise DataError(f"no file has the tensor {name!r}")
