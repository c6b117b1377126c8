"""Safetensors files that several processes fill in place: each writes its own blocks.

No process holds a whole weight, and the bytes of a file do not depend on the division into blocks.

    8 bytes   length of the header, little-endian
    header    JSON: dtype, shape and byte range of each tensor
    data      tensors one after another, row-major

`torch.distributed.checkpoint` assembles each rank's share in memory, writes the shares, then merges them, and
takes no digest.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from millrace.core.progress import count
from millrace.trainer.files import checkpoint_manifest
from millrace.trainer.ranks.blocks import OwnedBlock

CHUNK_BYTES = 1 << 24  # bytes of a block that are converted, or copied from a device, at a time
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}

UnfusedTensors = list[tuple[str, tuple[int, ...]]]
"""Name and shape of each unfused tensor, in their order in the fused tensor."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file to be filled. `tensors`: the place of each tensor behind the header, and its dtype in the file.
    `names`: of the tensors in the file."""

    name: str
    header: bytes  # with its length
    tensors: dict[str, tuple[int, torch.dtype]]
    names: list[str]
    data_bytes: int


def lay_out(
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    unfused: Mapping[str, UnfusedTensors] = {},
) -> list[TensorFile]:
    """Files for `tensors`, in their order: `stem`.safetensors, or several files if one would be too large.

    The values of the tensors are not read, and may be on several processes. `dtype`: in the files. `unfused`:
    of each fused tensor, the tensors that files have in its place.
    """
    shares: list[dict[str, torch.Tensor]] = [{}]
    free = checkpoint_manifest.FILE_BYTES_MAX
    for name, tensor in tensors.items():
        size = tensor.numel() * (dtype or tensor.dtype).itemsize
        if size > free and shares[-1]:
            shares.append({})
            free = checkpoint_manifest.FILE_BYTES_MAX
        shares[-1][name] = tensor
        free -= size
    names = checkpoint_manifest.file_names(stem, len(shares))
    return [_file(name, share, dtype, unfused) for name, share in zip(names, shares, strict=True)]


def _file(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    unfused: Mapping[str, UnfusedTensors],
) -> TensorFile:
    entries: dict[str, Any] = {}
    places, end = {}, 0
    for key, tensor in tensors.items():
        kind = dtype or tensor.dtype
        places[key] = end, kind
        for file_key, shape in unfused.get(key, [(key, tuple(tensor.shape))]):
            begin, end = end, end + math.prod(shape) * kind.itemsize
            entries[file_key] = {"dtype": NAMES[kind], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return TensorFile(name, len(text).to_bytes(8, "little") + text, places, list(entries), end)


def index(files: Sequence[TensorFile]) -> bytes:
    """The index file of a model, which `transformers` reads: the file of each tensor."""
    size = sum(file.data_bytes for file in files)
    names = {key: file.name for file in files for key in file.names}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2).encode()


def make(directory: Path, files: Iterable[TensorFile]) -> None:
    """Create the files, without data. One process calls this, before any process fills the files."""
    for file in files:
        with (directory / file.name).open("xb") as stream:
            stream.write(file.header)
            stream.truncate(len(file.header) + file.data_bytes)


def fill(directory: Path, files: Iterable[TensorFile], blocks: Collection[OwnedBlock]) -> None:
    """Write `blocks` to their places, in the dtype of the files. The kernel may store the bytes later."""
    on_gpu = any(owned.block.is_cuda for owned in blocks)
    with torch.cuda.stream(torch.cuda.Stream() if on_gpu else None):  # beside the GPU's computation
        for file in files:
            with (directory / file.name).open("r+b", buffering=0) as stream:
                for owned in (owned for owned in blocks if owned.name in file.tensors):
                    begin, dtype = file.tensors[owned.name]
                    _write(stream.fileno(), len(file.header) + begin, dtype, owned)


def _write(descriptor: int, begin: int, dtype: torch.dtype, owned: OwnedBlock) -> None:
    """Write a block: one write for each run of adjacent elements."""
    places, length = _runs(owned)
    size = length * dtype.itemsize
    runs = owned.block.detach().reshape(len(places), length)
    rows, columns = max(1, CHUNK_BYTES // size), max(1, CHUNK_BYTES // dtype.itemsize)
    for first in range(0, len(places), rows):
        for column in range(0, length, columns):
            chunk = runs[first : first + rows, column : column + columns].to("cpu", dtype).contiguous()
            for place, row in zip(places[first : first + rows], chunk, strict=True):
                offset = begin + (place + column) * dtype.itemsize
                _write_all(descriptor, row.view(torch.uint8).numpy(), offset)


def _runs(owned: OwnedBlock) -> tuple[list[int], int]:
    """Where each run of adjacent elements begins in the whole tensor, and the length of all runs. In
    elements."""
    block, shape = tuple(owned.block.shape), owned.shape
    complete_from = len(shape)  # the block has all indices of the dimensions from here on
    while complete_from and block[complete_from - 1] == shape[complete_from - 1]:
        complete_from -= 1
    outer = max(0, complete_from - 1)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(owned.start, strides, strict=True))
    places = torch.full((1,), first)
    for size, stride in zip(block[:outer], strides, strict=False):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places.tolist(), math.prod(block[outer:])


def _write_all(descriptor: int, data: memoryview, place: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written
        count(written)


def open_tensors(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    """The tensors of the files, mapped: they take no memory."""
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors
