"""Safetensors files that several processes fill in place: each writes the blocks that it holds.

No process holds a whole weight for that, and what is written does not depend on who held what.

    8 bytes   length of the header, little-endian
    header    JSON: dtype, shape and byte range of each tensor
    data      tensors one after another, row-major

`torch.distributed.checkpoint` puts together each rank's share in memory, writes these, then merges them,
and takes no digest.
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

from millrace.trainer.ranks.blocks import OwnedBlock

FILE_BYTES_MAX = 4 * 10**9
CHUNK_BYTES = 1 << 24  # held at a time of a block that is converted, or fetched from a device
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
"""Name and shape of each, as they lie one after another in a tensor."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file to be filled. `tensors`: where each begins behind the header, and its dtype there. `names`: in
    the file."""

    name: str
    header: bytes  # with its length
    tensors: dict[str, tuple[int, torch.dtype]]
    names: list[str]
    data_bytes: int


def lay_out(
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    pieces: Mapping[str, UnfusedTensors] = {},
) -> list[TensorFile]:
    """Files for `tensors`, in their order: `stem`.safetensors, or several where one would be too large.

    Their values are not looked at, and they may be on several processes. `dtype`: in the files. `pieces`: of
    a tensor that has other names there.
    """
    shares: list[dict[str, torch.Tensor]] = [{}]
    free = FILE_BYTES_MAX
    for name, tensor in tensors.items():
        size = tensor.numel() * (dtype or tensor.dtype).itemsize
        if size > free and shares[-1]:
            shares.append({})
            free = FILE_BYTES_MAX
        shares[-1][name] = tensor
        free -= size
    names = file_names(stem, len(shares))
    return [_file(name, share, dtype, pieces) for name, share in zip(names, shares, strict=True)]


def file_names(stem: str, count: int) -> list[str]:
    """As Hugging Face names the files of a model."""
    if count < 2:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _file(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    pieces: Mapping[str, UnfusedTensors],
) -> TensorFile:
    entries: dict[str, Any] = {}
    places, end = {}, 0
    for key, tensor in tensors.items():
        kind = dtype or tensor.dtype
        places[key] = end, kind
        for piece, shape in pieces.get(key, [(key, tuple(tensor.shape))]):
            begin, end = end, end + math.prod(shape) * kind.itemsize
            entries[piece] = {"dtype": NAMES[kind], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return TensorFile(name, len(text).to_bytes(8, "little") + text, places, list(entries), end)


def index(files: Sequence[TensorFile]) -> bytes:
    """Which tensor is in which file, as `transformers` reads it."""
    size = sum(file.data_bytes for file in files)
    names = {key: file.name for file in files for key in file.names}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2).encode()


def make(directory: Path, files: Iterable[TensorFile]) -> None:
    """By one process, before any of them fills the files."""
    for file in files:
        with (directory / file.name).open("xb") as stream:
            stream.write(file.header)
            stream.truncate(len(file.header) + file.data_bytes)


def fill(directory: Path, files: Iterable[TensorFile], parts: Collection[OwnedBlock]) -> None:
    """Write `parts` where they belong, in the dtype of the files. The system may not have stored them yet."""
    on_gpu = any(part.block.is_cuda for part in parts)
    with torch.cuda.stream(torch.cuda.Stream() if on_gpu else None):  # beside what is computed meanwhile
        for file in files:
            with (directory / file.name).open("r+b", buffering=0) as stream:
                for part in (part for part in parts if part.name in file.tensors):
                    begin, dtype = file.tensors[part.name]
                    _write(stream.fileno(), len(file.header) + begin, dtype, part)


def _write(descriptor: int, begin: int, dtype: torch.dtype, part: OwnedBlock) -> None:
    """One write for each stretch of the whole tensor that lies in the block without a gap."""
    places, length = _stretches(part)
    size = length * dtype.itemsize
    stretches = part.block.detach().reshape(len(places), length)
    rows, columns = max(1, CHUNK_BYTES // size), max(1, CHUNK_BYTES // dtype.itemsize)
    for first in range(0, len(places), rows):
        for left in range(0, length, columns):
            chunk = stretches[first : first + rows, left : left + columns].to("cpu", dtype).contiguous()
            for place, row in zip(places[first : first + rows], chunk, strict=True):
                _write_all(descriptor, row.view(torch.uint8).numpy(), begin + (place + left) * dtype.itemsize)


def _stretches(part: OwnedBlock) -> tuple[list[int], int]:
    """Where each begins in the whole tensor, and its length. In elements."""
    block, whole = tuple(part.block.shape), part.shape
    whole_from = len(whole)  # the dimensions from here on are in the block completely
    while whole_from and block[whole_from - 1] == whole[whole_from - 1]:
        whole_from -= 1
    outer = max(0, whole_from - 1)
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = sum(start * stride for start, stride in zip(part.start, strides, strict=True))
    places = torch.full((1,), first)
    for size, stride in zip(block[:outer], strides, strict=False):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places.tolist(), math.prod(block[outer:])


def _write_all(descriptor: int, data: memoryview, place: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written


def open_tensors(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    """What the files hold, where it lies in them: no memory is taken."""
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found
