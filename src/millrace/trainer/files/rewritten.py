"""A model directory from another one, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from millrace.core.errors import DataError, boundary
from millrace.placement.model_directory import indexed_files
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.tokens import read_tokenizer, write_tokenizer

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
