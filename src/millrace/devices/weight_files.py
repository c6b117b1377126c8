"""Reads the tensors of a Hugging Face model directory, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from millrace.core.errors import DataError
from millrace.placement.model_directory import indexed_files


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, mapped from the files. Raises: DataError: the directory has no weight file."""
    for path in _weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _weight_files(directory: Path) -> Iterable[Path]:
    if indexed := indexed_files(directory):
        return indexed
    if (single := directory / "model.safetensors").exists():
        return [single]
    raise DataError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
