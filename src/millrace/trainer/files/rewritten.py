"""A model directory from another one, tensor by tensor: the text part of a model that also reads images, and
weights in mxfp4, as gpt-oss is published, in bfloat16.

A number has 4 bits: a sign, two bits of exponent, one of mantissa. 32 numbers share a power of two. Source:
OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.

Shape suffixes: E experts, O outputs, G groups of 32 inputs, I = 32 G inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from millrace.core.errors import DataError, boundary
from millrace.core.supported import MXFP4, TRAINER
from millrace.placement.model_directory import indexed_files, read_model_config
from millrace.trainer.files.companion_files import read_tokenizer, write_tokenizer
from millrace.trainer.files.directories import atomic_directory

Tensors = Iterator[tuple[str, Any]]
FILE_BYTES = 4 * 10**9  # a file is written when its tensors have so many bytes


def rewrite(model: Path, out: Path, config: dict[str, Any], tensors: Callable[[Path], Tensors]) -> None:
    """Write `config`, what `tensors` makes of each weight file of `model`, and its tokenizer to `out`.

    Raises: DataError: a file cannot be read, or no tensor is left.
    """
    with atomic_directory(out, marker="config.json") as directory:
        places: dict[str, str] = {}
        for file in indexed_files(model) or sorted(model.glob("*.safetensors")):
            for part, some in enumerate(_parts(file, tensors)):
                name = f"{file.stem}-{part}.safetensors" if part else file.name
                save_file(some, directory / name, metadata={"format": "pt"})
                places |= dict.fromkeys(some, name)
        if not places:
            raise DataError(f"{model}: no tensor has a name of such a model")
        if set(places.values()) != {"model.safetensors"}:
            index = {"metadata": {}, "weight_map": places}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        write_tokenizer(read_tokenizer(model), directory)
        written = config | {"tie_word_embeddings": "lm_head.weight" not in places}  # defaults differ
        (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _parts(file: Path, tensors: Callable[[Path], Tensors]) -> Iterator[dict[str, Any]]:
    part: dict[str, Any] = {}
    with boundary("`model`", f"read {file}", DataError):
        for name, tensor in tensors(file):
            part[name] = tensor
            if sum(each.nbytes for each in part.values()) >= FILE_BYTES:
                yield part
                part = {}
    if part:
        yield part


# ---------------------------------------------------------------- the text part


NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""How names of the text part begin in files, and how they begin in a model of text."""
SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys that files have beside the text part's configuration, and that are about its tokens or numbers."""


def write_text_part(model: Path, out: Path) -> None:
    """Write the text part of `model` to `out`, tensor by tensor as it is.

    Raises: DataError: `model` has no text part, or one of a family that the trainer does not run.
    """
    rewrite(model, out, _text_config(model), _of_text)


def _text_config(model: Path) -> dict[str, Any]:
    config = read_model_config(model)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise DataError(f"{model} has no text part: its config.json has no `text_config`. Use it as it is")
    if text.get("model_type") not in TRAINER.families:
        raise DataError(
            f"{model}: its text part is of the family {text.get('model_type')!r}, which the trainer does not "
            f"run.\n  It runs {', '.join(TRAINER.families)}"
        )
    return {key: config[key] for key in SHARED if key in config} | text


def _of_text(path: Path) -> Tensors:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            for begin, replaced in NAMES.items():
                if name.startswith(begin):
                    yield replaced + name.removeprefix(begin), file.get_tensor(name)
                    break


# ---------------------------------------------------------------- from mxfp4


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
