"""Digests of weights: the one definition that trainer, relay and replica share.

A tensor's digest is XXH3-128 of its raw bytes (row-major, in the published dtype). It detects every
accidental change, at memory speed. It is no defence against an adversary. A version's digest covers names,
dtypes, shapes and tensor digests in order. So it also detects a tensor that is dropped, renamed, swapped or
moved.

A publisher that computes on a GPU digests there, with a hash for GPUs (`multilinear`). The digests of this
hash begin with its kind, `ml-`. A reader checks a digest with the hash of the digest's kind.

Several processes may hold the blocks of one tensor. Each process digests its blocks, and the tensor's digest
is made of the blocks' digests. `published_digest` is the version digest that is made of blocks.
`digest_buffers` is the version digest of whole tensors. With one block a tensor the two are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from millrace.core.multilinear import Multilinear
from millrace.core.progress import count

XXH3, MULTILINEAR = "", "ml-"
BAND_BYTES = 1 << 18  # copied at a time from a block that is not contiguous: they stay in the cache


class BlockDigest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A block of a tensor, which one process published."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str  # of its bytes, row-major
    absent: bool = False  # a process on another host wrote the block, and this slot lacks it


Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
NamedBlock = tuple[str, BlockDigest]  # with the tensor's name


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor is in a slot. `offset` counts from the start of the slot's data."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    blocks: tuple[BlockDigest, ...] = msgspec.field(default=(), name="pieces")  # together they are the tensor

    @property
    def digest(self) -> str:
        """The digest of the only block, or a digest of the digests of all blocks."""
        if len(self.blocks) == 1:
            return self.blocks[0].digest
        entries = sorted((block.start, block.shape, block.digest) for block in self.blocks)
        return _of_digests(entries, version_kind([self]))


class Filling(msgspec.Struct, frozen=True):
    """One filling of a slot, while its writers write."""

    version: int
    slot: int
    sequence: int


class NamedBuffer(msgspec.Struct, frozen=True):
    """The bytes of a tensor, or of a block of a tensor. `data` is a contiguous buffer of uint8 (a numpy array
    or memoryview)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any
    start: tuple[int, ...] | None = None  # where the block begins in its tensor; None: a whole tensor


def kind_of(digest: str) -> str:
    """XXH3 or MULTILINEAR: the hash that made the digest."""
    return MULTILINEAR if digest.startswith(MULTILINEAR) else XXH3


def tensor_digest(data: Any, kind: str = XXH3) -> str:
    """The digest of a contiguous buffer: the kind, and 128 bits in hex."""
    count(len(data))
    if kind == XXH3:
        return xxhash.xxh3_128_hexdigest(data)
    state = Multilinear()
    state.update(data)
    return kind + state.hexdigest()


def block_digest(block: NDArray[np.uint8], kind: str = XXH3) -> str:
    """As `tensor_digest`, of a block of any strides, row-major. It copies `BAND_BYTES` at a time."""
    if block.flags.c_contiguous:
        return tensor_digest(block.reshape(-1), kind)
    state = xxhash.xxh3_128() if kind == XXH3 else Multilinear()
    step = max(1, BAND_BYTES // max(1, block[0].size))
    for first in range(0, len(block), step):
        state.update(block[first : first + step].tobytes())
    return kind + state.hexdigest()


def version_digest(entries: Iterable[tuple[str, str, Sequence[int], str]], kind: str = XXH3) -> str:
    """Digest of (name, dtype, shape, tensor digest) in order. `kind`: of the tensor digests."""
    return _of_digests([(n, d, list(s), h) for n, d, s, h in entries], kind)


def digest_buffers(buffers: Iterable[NamedBuffer], kind: str = XXH3, *, each: Each = map) -> str:
    """The version digest of complete tensors in buffers. `each`: a `map` in several threads, for example."""

    def entry(b: NamedBuffer) -> tuple[str, str, Sequence[int], str]:
        return b.name, b.dtype, b.shape, tensor_digest(b.data, kind)

    return version_digest(each(entry, buffers), kind)


def digest_blocks(blocks: Iterable[NamedBuffer], *, each: Each = map) -> list[NamedBlock]:
    """The name and the digest of each block. `each`: as of `digest_buffers`."""

    def entry(b: NamedBuffer) -> NamedBlock:
        return b.name, BlockDigest(b.start or (0,) * len(b.shape), tuple(b.shape), tensor_digest(b.data))

    return list(each(entry, blocks))


def published_digest(tensors: Sequence[TensorSpec]) -> str:
    """The version digest of tensors in blocks."""
    entries = ((t.name, t.dtype, t.shape, t.digest) for t in tensors)
    return version_digest(entries, version_kind(tensors))


def version_kind(tensors: Iterable[TensorSpec]) -> str:
    """The kind of the digests of the tensors' blocks."""
    return next((kind_of(block.digest) for tensor in tensors for block in tensor.blocks), XXH3)


def _of_digests(entries: Any, kind: str) -> str:
    return kind + xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(entries))


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> list[TensorSpec]:
    """Place tensors (name, dtype, shape, bytes) one after the other in a slot."""
    specs, offset = [], 0
    for name, dtype, shape, num_bytes in tensors:
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, num_bytes))
        offset += num_bytes
    return specs
