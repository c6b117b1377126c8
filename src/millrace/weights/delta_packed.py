"""The format of a delta: a head with a checksum, and sections that zstandard compresses.

check   u64   XXH3 of all bytes after it
base    u64   XXH3 of the old bytes; raw: 0
bytes   u32   length of the old bytes and of the new ones
kind    u8    place in KINDS
width   u8    bytes of an element
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from millrace.core.errors import CorruptDeltaError

Bytes = NDArray[np.uint8]
Squeeze = Callable[[Any], bytes]

RAW, XOR, SPARSE = KINDS = ("raw", "xor", "sparse")
HEAD = struct.Struct("<QQIBB")
CHECK, COUNT = struct.Struct("<Q"), struct.Struct("<I")
SECTION = struct.Struct("<II")  # bytes before and after compression; equal: not compressed

# Sections are noise that only Huffman coding compresses: hashes of 7 bytes find the runs and little else.
SQUEEZE = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=12, chain_log=6, search_log=1, min_match=7, strategy=1, write_content_size=False
)


def squeezer() -> Squeeze:
    """The function that compresses sections, for one thread at a time."""
    return zstandard.ZstdCompressor(compression_params=SQUEEZE).compress


def section(plain: Bytes, squeeze: Squeeze) -> bytes:
    packed = squeeze(plain) if len(plain) else b""
    if len(packed) >= len(plain):
        packed = plain.tobytes()
    return SECTION.pack(len(plain), len(packed)) + packed


class Sections:
    """Reads a body in order. Every method raises CorruptDeltaError.

    A length is checked before memory of this length is allocated."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    def count(self) -> int:
        return int(COUNT.unpack(self._cut(COUNT.size))[0])

    def take(self, least: int, most: int | None = None) -> Bytes:
        """The next section, of `least` to `most` bytes, or exactly `least`."""
        plain, packed = SECTION.unpack(self._cut(SECTION.size))
        if not least <= plain <= (least if most is None else most):
            raise CorruptDeltaError(
                f"a delta has a section of {plain} bytes, not of {least} to {most or least}"
            )
        data = self._cut(packed)
        if packed == plain:
            return np.frombuffer(data, np.uint8)
        try:
            claimed = zstandard.frame_content_size(
                data
            )  # zstd allocates as much; -1: the frame claims nothing
            if claimed not in (-1, plain):
                raise zstandard.ZstdError(f"its frame claims {claimed} bytes, not {plain}")
            unpacked = zstandard.ZstdDecompressor().decompress(data, max_output_size=plain)
        except zstandard.ZstdError as error:
            raise CorruptDeltaError(f"a delta has a section that cannot be unpacked: {error}") from error
        if len(unpacked) != plain:
            raise CorruptDeltaError(f"a delta has a section of {len(unpacked)} bytes, not of {plain}")
        return np.frombuffer(unpacked, np.uint8)

    def close(self) -> None:
        if len(self._body):
            raise CorruptDeltaError(f"a delta has {len(self._body)} bytes after its end")

    def _cut(self, size: int) -> memoryview:
        if size > len(self._body):
            raise CorruptDeltaError(
                f"a delta ends too early: {len(self._body)} bytes remain, {size} expected"
            )
        cut, self._body = self._body[:size], self._body[size:]
        return cut


def with_checksum(kind: str, width: int, num_bytes: int, base: int, body: bytes) -> bytes:
    """The payload: head and body."""
    payload = bytearray(HEAD.pack(0, base, num_bytes, KINDS.index(kind), width) + body)
    CHECK.pack_into(payload, 0, xxhash.xxh3_64_intdigest(memoryview(payload)[CHECK.size :]))
    return bytes(payload)


def head(view: memoryview) -> tuple[str, int, int, int, int]:
    """(kind, width, bytes, base, checksum). Raises CorruptDeltaError."""
    if len(view) < HEAD.size:
        raise CorruptDeltaError(f"a delta of {len(view)} bytes: its head alone has {HEAD.size}")
    check, base, num_bytes, kind, width = HEAD.unpack(view[: HEAD.size])
    if kind >= len(KINDS) or width not in (1, 2, 4, 8):
        raise CorruptDeltaError(
            f"a delta of kind {kind} and width {width}: damaged, or made by a later build"
        )
    return KINDS[kind], width, num_bytes, base, check


def opened(payload: Any) -> tuple[str, int, int, int, memoryview]:
    """(kind, width, bytes, base, body), checked. Raises CorruptDeltaError."""
    view = memoryview(payload).cast("B")
    kind, width, num_bytes, base, check = head(view)
    if xxhash.xxh3_64_intdigest(view[CHECK.size :]) != check:
        raise CorruptDeltaError(f"a delta of {len(view)} bytes is damaged: its checksum is another")
    return kind, width, num_bytes, base, view[HEAD.size :]
