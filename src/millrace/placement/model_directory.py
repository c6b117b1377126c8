"""What the files of a model say, without its weights: tensors by their headers, and `config.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from millrace.config.tables.training import Adapter
from millrace.core.errors import DataError, boundary


def tensor_elements(directory: Path) -> dict[str, int]:
    """Elements of each tensor, from the headers of the safetensors files."""
    return {name: math.prod(shape) for name, shape in tensor_shapes(directory).items()}


def adapter_shapes(directory: Path, adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """(outputs, inputs) of each matrix that gets an adapter. Raises: ConfigError: the model can have no such
    adapter."""
    matrices = {n.removesuffix(".weight"): s for n, s in tensor_shapes(directory).items() if len(s) > 1}
    return {name: matrices[name] for name in adapter.layers(matrices)}


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for file in weight_files(directory) for name, shape in _shapes(file).items()}


def weight_files(directory: Path) -> list[Path]:
    """The files that are loaded. A repository may have the same weights in other files too."""
    if indexed := indexed_files(directory):
        return indexed
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError(f"{directory} has no *.safetensors file")
    return files


def indexed_files(directory: Path) -> list[Path]:
    """The files that the directory's index names; empty if there is no index.

    Raises: DataError: the index has no place for a tensor, or names a file that is no safetensors file in the
    directory and so not part of the model.
    """
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return []
    with boundary("`model.path`", f"{index} does not say where each tensor is", DataError):
        names = sorted({*json.loads(index.read_text())["weight_map"].values()})
        outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise DataError(
            f"{index} names {outside[0]!r}: weights must be *.safetensors files in {directory} itself.\n"
            "  What lies elsewhere is not part of the model: put the file there, and name it without a folder"
        )
    return [directory / name for name in names]


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is not a safetensors file: {error}") from error


def vocab_size(directory: Path) -> float:
    """The model has the token ids below this. A tokenizer may stand without a model, and then all are."""
    model = read_model_config(directory) if (directory / "config.json").is_file() else {}
    size: float = model.get("vocab_size", math.inf)
    return size


def read_model_config(directory: Path) -> dict[str, Any]:
    with boundary("model", f"cannot read {directory / 'config.json'}", DataError):
        return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
