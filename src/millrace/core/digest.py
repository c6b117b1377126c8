"""Digests of weights: the one definition that trainer, relay and replica share.

A tensor's digest is XXH3-128 of its raw bytes (row-major, in the published dtype): it detects every
accidental change, at memory speed; it is no defence against an adversary. A version's digest covers
names, dtypes, shapes and tensor digests in order, so a dropped, renamed, swapped or reordered tensor
changes it too.

Where the publisher computes on a GPU, it digests there, by a hash that is made for it (`multilinear`). Such
digests begin with the kind, `ml-`. Whoever checks a digest takes one of its kind.

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

from millrace.core.multilinear import Multilinear

XXH3, MULTILINEAR = "", "ml-"
BAND_BYTES = 1 << 18  # of a block that is not contiguous: they stay in the cache


class BlockDigest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A block of a tensor, as one process published it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str  # of its bytes, row-major
    absent: bool = False  # from this slot, so far: a process on another host wrote it


NamedPiece = tuple[str, BlockDigest]  # with the tensor's name


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor is in a slot. `offset` counts from the start of the slot's data."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    pieces: tuple[BlockDigest, ...] = ()  # in a slot that is written: together they are the tensor

    @property
    def digest(self) -> str:
        """That of its only piece, or one made of those of its pieces."""
        if len(self.pieces) == 1:
            return self.pieces[0].digest
        made = sorted((piece.start, piece.shape, piece.digest) for piece in self.pieces)
        return _of_digests(made, version_kind([self]))


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


def kind_of(digest: str) -> str:
    """XXH3 or MULTILINEAR: which hash it was computed with."""
    return MULTILINEAR if digest.startswith(MULTILINEAR) else XXH3


def tensor_digest(data: Any, kind: str = XXH3) -> str:
    """Kind, and hex of 128 bits, of a contiguous buffer."""
    if kind == XXH3:
        return xxhash.xxh3_128_hexdigest(data)
    state = Multilinear()
    state.update(data)
    return kind + state.hexdigest()


def block_digest(block: NDArray[np.uint8], kind: str = XXH3) -> str:
    """As `tensor_digest`, of any strides: of the bytes one after the other. It copies some at a time."""
    if block.flags.c_contiguous:
        return tensor_digest(block.reshape(-1), kind)
    state = xxhash.xxh3_128() if kind == XXH3 else Multilinear()
    step = max(1, BAND_BYTES // max(1, block[0].size))
    for first in range(0, len(block), step):
        state.update(block[first : first + step].tobytes())
    return kind + state.hexdigest()


def version_digest(entries: Iterable[tuple[str, str, Sequence[int], str]], kind: str = XXH3) -> str:
    """Digest of (name, dtype, shape, tensor digest) in order, these of `kind`."""
    return _of_digests([(n, d, list(s), h) for n, d, s, h in entries], kind)


def digest_buffers(buffers: Iterable[NamedBuffer], kind: str = XXH3) -> str:
    """The version digest of tensors held as buffers."""
    return version_digest(((b.name, b.dtype, b.shape, tensor_digest(b.data, kind)) for b in buffers), kind)


def digest_blocks(blocks: Iterable[NamedBuffer]) -> list[NamedPiece]:
    """The pieces that these are."""
    return [
        (b.name, BlockDigest(b.start or (0,) * len(b.shape), tuple(b.shape), tensor_digest(b.data)))
        for b in blocks
    ]


def published_digest(tensors: Sequence[TensorSpec]) -> str:
    """The version digest of tensors in pieces."""
    entries = ((t.name, t.dtype, t.shape, t.digest) for t in tensors)
    return version_digest(entries, version_kind(tensors))


def version_kind(tensors: Iterable[TensorSpec]) -> str:
    """That of the digests of their pieces."""
    return next((kind_of(piece.digest) for tensor in tensors for piece in tensor.pieces), XXH3)


def _of_digests(made: Any, kind: str) -> str:
    return kind + xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(made))


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> list[TensorSpec]:
    """Tensors, given as (name, dtype, shape, bytes), one after the other in a slot."""
    found, offset = [], 0
    for name, dtype, shape, num_bytes in tensors:
        found.append(TensorSpec(name, dtype, tuple(shape), offset, num_bytes))
        offset += num_bytes
    return found
