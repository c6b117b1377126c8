"""Digests of weights: the one definition that trainer, relay and replica share.

A tensor's digest is XXH3-128 of its raw bytes (row-major, in the published dtype): it detects every
accidental change, at memory speed; it is no defence against an adversary. A version's digest covers
names, dtypes, shapes and tensor digests in order, so a dropped, renamed, swapped or reordered tensor
changes it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import xxhash


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor is in a slot. `offset` counts from the start of the slot's data."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class NamedBuffer(msgspec.Struct, frozen=True):
    """One tensor as bytes. `data` is a contiguous buffer of uint8 (a numpy array or memoryview)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any


def tensor_digest(data: Any) -> str:
    """Hex XXH3-128 of a contiguous buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def version_digest(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Digest of (name, dtype, shape, tensor digest) in order."""
    packed = msgspec.msgpack.encode([(n, d, list(s), h) for n, d, s, h in entries])
    return xxhash.xxh3_128_hexdigest(packed)


def digest_buffers(buffers: Iterable[NamedBuffer]) -> str:
    """The version digest of tensors held as buffers."""
    return version_digest((b.name, b.dtype, b.shape, tensor_digest(b.data)) for b in buffers)
