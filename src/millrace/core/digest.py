"""Digests of weights: the one definition that trainer, relay and replica share.

A tensor's digest is XXH3-128 of its raw bytes (row-major, in the published dtype): it detects every
accidental change, at memory speed; it is no defence against an adversary. A version's digest covers
names, dtypes, shapes and tensor digests in order, so a dropped, renamed, swapped or reordered tensor
changes it too.

Where several processes hold a tensor, none can digest it whole. Each digests its pieces, and the tensor's
digest is made of theirs. The version digest is then of the pieces (`published_digest`). Whoever reads whole
tensors digests these (`digest_buffers`). With one piece for each tensor the two are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

BAND_BYTES = 1 << 18  # of a block that is not contiguous: they stay in the cache


class Piece(msgspec.Struct, frozen=True):
    """A block of a tensor, as one process published it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str  # of its bytes, row-major


NamedPiece = tuple[str, Piece]  # with the tensor's name


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor is in a slot. `offset` counts from the start of the slot's data."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    pieces: tuple[Piece, ...] = ()  # in a slot that is written: together they are the tensor

    @property
    def digest(self) -> str:
        """That of its only piece, or one made of those of its pieces."""
        if len(self.pieces) == 1:
            return self.pieces[0].digest
        made = sorted((piece.start, piece.shape, piece.digest) for piece in self.pieces)
        return tensor_digest(msgspec.msgpack.encode(made))


class Filling(msgspec.Struct, frozen=True):
    """One filling of a slot, in the hands of its writers."""

    version: int
    slot: int
    sequence: int


class NamedBuffer(msgspec.Struct, frozen=True):
    """One tensor as bytes, or a block of one. `data` is a contiguous buffer of uint8 (a numpy array or
    memoryview)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any
    start: tuple[int, ...] | None = None  # where it begins in its tensor; None: it is the whole tensor


def tensor_digest(data: Any) -> str:
    """Hex XXH3-128 of a contiguous buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def block_digest(block: NDArray[np.uint8]) -> str:
    """As `tensor_digest`, of any strides: of the bytes one after the other. It copies some at a time."""
    if block.flags.c_contiguous:
        return tensor_digest(block)
    state, step = xxhash.xxh3_128(), max(1, BAND_BYTES // max(1, block[0].size))
    for first in range(0, len(block), step):
        state.update(block[first : first + step].tobytes())
    return state.hexdigest()


def version_digest(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Digest of (name, dtype, shape, tensor digest) in order."""
    packed = msgspec.msgpack.encode([(n, d, list(s), h) for n, d, s, h in entries])
    return xxhash.xxh3_128_hexdigest(packed)


def digest_buffers(buffers: Iterable[NamedBuffer]) -> str:
    """The version digest of tensors held as buffers."""
    return version_digest((b.name, b.dtype, b.shape, tensor_digest(b.data)) for b in buffers)


def published_digest(tensors: Iterable[TensorSpec]) -> str:
    """The version digest of tensors in pieces."""
    return version_digest((t.name, t.dtype, t.shape, t.digest) for t in tensors)


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> list[TensorSpec]:
    """Tensors, given as (name, dtype, shape, bytes), one after the other in a slot."""
    found, offset = [], 0
    for name, dtype, shape, num_bytes in tensors:
        found.append(TensorSpec(name, dtype, tuple(shape), offset, num_bytes))
        offset += num_bytes
    return found
