"""Deltas: the encoding of bytes as their difference from base bytes of the same length, and its format: a
head with a checksum, and sections that zstandard compresses. Pure functions.

After an optimizer step of reinforcement learning most published weights have the same bits as before. At a
learning rate of 1e-6, most updates are smaller than half a unit in the last place of a bfloat16. So few
elements change, and most changed elements change by one unit.

    sparse   positions as gaps, and the differences of the elements, as integers modulo 2^(8 width)
    xor      the exclusive or, its bytes in planes (all first bytes, all second ones, ...)
    raw      the new bytes

Elements are unsigned integers of `width` bytes. So `apply` restores all bytes bit for bit: NaN and -0, floats
and integers, lengths that are no multiple of the width, no bytes at all. A width other than the tensor's only
makes the delta larger.

The head:

    check   u64   XXH3 of all bytes after it
    base    u64   XXH3 of the old bytes; raw: 0
    bytes   u32   length of the old bytes and of the new ones
    kind    u8    place in KINDS
    width   u8    bytes of an element

Source:
    PULSE, arXiv:2602.03839: sorted positions, their gaps, zstd-1. PULSE stores new values. We store
    differences, which are smaller.
    zstd with the older bytes as its prefix makes deltas 1.7 to 2.5 times as large, and encodes them 5 to 12
    times as slowly.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from millrace.core.errors import CorruptDeltaError, WeightsError, WrongBaseError

Bytes = NDArray[np.uint8]

Array = NDArray[Any]

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
CHUNK_BYTES_MAX = 1 << 28

SKIP = 255  # in gaps: 255 elements are equal, and the next gap continues this gap
ESCAPE = 15  # in a nibble: the difference is in the planes of large differences

SCAN_BYTES_S = 4e9  # of one core, to compare and to digest
CHANGED_S = 12e-9  # of one core, for each changed element
XOR_BYTES_S = 7e8  # of one core
CHUNK_S = 4e-4  # for each delta of any size: threads and calls
SAMPLE_BYTES = 1 << 16
_INSIDE = {8: (0, 0), 4: (1, 1), 2: (2, 3), 1: (3, 7)}  # by width: bits of an element's index in a word, mask
DENSE = 0.9  # of 8-byte words: if more words changed, no sparse delta is tried


def encode(new: Any, old: Any, width: int, *, link_bytes_s: float = 0.0) -> bytes:
    """`new` as a delta against `old`. The kind is the fastest to encode and send, as the two overlap.

    Args:
        new, old: contiguous buffers of one length.
        width: bytes of an element: 1, 2, 4 or 8.
        link_bytes_s: the link's rate; 0: choose the smallest delta, at any encoding time.
    Raises: WeightsError: lengths differ, or are above CHUNK_BYTES_MAX.
    """
    after, before = _flat(new), _flat(old)
    num_bytes = len(after)
    if len(before) != num_bytes or num_bytes > CHUNK_BYTES_MAX or width not in (1, 2, 4, 8):
        raise WeightsError(
            f"no delta of {num_bytes} bytes against {len(before)} in elements of {width}: both must have "
            f"one length, of at most {CHUNK_BYTES_MAX}, and elements 1, 2, 4 or 8 bytes"
        )
    if not num_bytes:
        return with_checksum(RAW, width, 0, 0, b"")
    words, old_words = _words(after), _words(before)
    body = _smallest(words, old_words, width, num_bytes, link_bytes_s)
    if body is None or len(body[1]) >= num_bytes:
        return with_checksum(RAW, width, num_bytes, 0, after.tobytes())
    return with_checksum(body[0], width, num_bytes, _base(before), body[1])


def apply(payload: Any, old: Any, into: Any) -> None:
    """Write the new bytes of `payload` into `into`, which may be `old`. After an error `into` is undefined.

    Args:
        old: the base bytes of the delta; for a raw delta of any length.
        into: a writable buffer of the new bytes' length.
    Raises:
        CorruptDeltaError: the payload is damaged, or of another length than `into`.
        WrongBaseError: the delta's base differs from `old`.
    """
    kind, width, num_bytes, base, body = opened(payload)
    target = _flat(into)
    if num_bytes != len(target):
        raise CorruptDeltaError(f"a delta is of {num_bytes} bytes, its place has {len(target)}")
    if kind == RAW:
        if len(body) != num_bytes:
            raise CorruptDeltaError(f"a raw delta of {num_bytes} bytes has {len(body)}")
        target[:] = np.frombuffer(body, np.uint8)
        return
    before = _flat(old)
    if len(before) != num_bytes or _base(before) != base:
        raise WrongBaseError(
            f"a delta of {num_bytes} bytes was made against others than the {len(before)} that are here: "
            "fetch the version that it was made against, or a whole one"
        )
    if before.ctypes.data != target.ctypes.data:
        target[:] = before
    words = _words(target)
    sections = Sections(body)
    (_add if kind == SPARSE else _flip)(words, width, sections)
    sections.close()
    if len(words) * 8 != num_bytes or words.ctypes.data != target.ctypes.data:
        target[:] = words.view(np.uint8)[:num_bytes]


def kind_of(payload: Any) -> str:
    """RAW, XOR or SPARSE, from the head only. Raises CorruptDeltaError."""
    return head(memoryview(payload))[0]


def _smallest(
    words: Array, old_words: Array, width: int, num_bytes: int, link_bytes_s: float
) -> tuple[str, bytes] | None:
    """(kind, body); None: raw."""

    def cost(encode_s: float, size: float) -> tuple[float, float]:
        return (max(encode_s, size / link_bytes_s), size) if link_bytes_s else (size, 0.0)

    squeeze = squeezer()
    differ = words != old_words
    costs = {RAW: cost(0.0, num_bytes)}
    if (num_changed := np.count_nonzero(differ)) <= DENSE * len(words):
        places, differences = _changed(words, old_words, np.flatnonzero(differ), width)
        escapes = np.count_nonzero(differences > ESCAPE)
        gap_bits = math.log2(num_bytes / width / max(1, len(places))) + 3.5
        size = len(places) * gap_bits / 8 + escapes * width
        costs[SPARSE] = cost(CHUNK_S + num_bytes / SCAN_BYTES_S + len(places) * CHANGED_S, size)
    if 2 * num_changed > len(words):
        sample = slice(0, SAMPLE_BYTES // 8)
        share = len(_xored(words[sample], old_words[sample], width, squeeze)) / words[sample].nbytes
        costs[XOR] = cost(CHUNK_S + num_bytes / XOR_BYTES_S, share * num_bytes)
    kind = min(costs, key=costs.__getitem__)
    if kind == SPARSE:
        return kind, _sparse(places, differences, squeeze)
    return None if kind == RAW else (kind, _xored(words, old_words, width, squeeze))


def _changed(words: Array, old_words: Array, changed: Array, width: int) -> tuple[Array, Array]:
    """Positions of the changed elements, and their differences: +1, -1, +2, ... as 1, 2, 3, ..."""
    kind = np.dtype(f"u{width}")
    differences = words.take(changed).view(kind) - old_words.take(changed).view(kind)
    inside = np.flatnonzero(differences != 0)
    shift, within = _INSIDE[width]
    places = (changed << shift).astype(np.int32).take(inside >> shift)
    places += (inside & within).astype(np.int32)
    signed = differences.take(inside).view(f"i{width}")
    return places, ((signed << 1) ^ (signed >> (8 * width - 1))).view(kind)


def _sparse(places: Array, differences: Array, squeeze: Squeeze) -> bytes:
    """The body of a sparse delta: the number of changed elements, then three kinds of sections. The gaps, the
    differences as nibbles, and the planes of the differences that are too large for a nibble."""
    distances = np.concatenate([places[:1], places[1:] - places[:-1] - np.int32(1)])
    far = np.flatnonzero(distances >= SKIP)
    skips = distances[far] // SKIP
    distances[far] -= skips * SKIP
    gaps = np.insert(distances.astype(np.uint8), np.repeat(far, skips), SKIP)
    nibbles = np.zeros(len(places) + len(places) % 2, np.uint8)
    nibbles[: len(places)] = np.minimum(differences, ESCAPE + 1) - 1
    both = nibbles.view("<u2")
    large = np.compress(differences > ESCAPE, differences)
    sections = (gaps, (both | both >> 4).astype(np.uint8), *_planes(large))
    return COUNT.pack(len(places)) + b"".join(section(plain, squeeze) for plain in sections)


def _add(words: Array, width: int, sections: Sections) -> None:
    """Add the differences of a sparse delta. Raises CorruptDeltaError."""
    elements, count = words.view(f"u{width}"), sections.count()
    gaps = sections.take(0, len(elements) + len(elements) // SKIP + 1)
    pairs = sections.take(-(-count // 2))
    changes = gaps != SKIP
    ends = np.cumsum(gaps + changes.astype(np.int64))
    places = ends[changes] - 1
    if len(places) != count or (count and places[-1] >= len(elements)):
        raise CorruptDeltaError(f"{len(places)} changes among {len(elements)} elements, not {count}")
    nibbles = np.empty(2 * len(pairs), np.uint8)
    nibbles[0::2], nibbles[1::2] = pairs & ESCAPE, pairs >> 4
    nibbles = nibbles[:count]
    differences = nibbles.astype(elements.dtype) + elements.dtype.type(1)
    large = np.flatnonzero(nibbles == ESCAPE)
    differences[large] = _joined([sections.take(len(large)) for _ in range(width)])
    bit = elements.dtype.type(1)
    elements[places] += (differences >> bit) ^ (~(differences & bit) + bit)


def _xored(words: Array, old_words: Array, width: int, squeeze: Squeeze) -> bytes:
    return b"".join(section(plane, squeeze) for plane in _planes((words ^ old_words).view(f"u{width}")))


def _flip(words: Array, width: int, sections: Sections) -> None:
    elements = words.view(f"u{width}")
    elements ^= _joined([sections.take(len(elements)) for _ in range(width)])


def _planes(elements: Array) -> list[Bytes]:
    width = elements.dtype.itemsize
    return [np.ascontiguousarray(plane) for plane in elements.view(np.uint8).reshape(-1, width).T]


def _joined(planes: list[Bytes]) -> Array:
    return np.stack(planes, axis=1).reshape(-1).view(f"u{len(planes)}")


def _base(before: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(before.data)


def _flat(data: Any) -> Bytes:
    array = np.asarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return array.reshape(-1).view(np.uint8)


def _words(data: Bytes) -> Array:
    """`data` as 8-byte words: a view, or a copy with zeros at the end if the words do not fit exactly."""
    if len(data) % 8 == 0 and data.ctypes.data % 8 == 0:
        return data.view(np.uint64)
    padded = np.zeros(-(-len(data) // 8) * 8, np.uint8)
    padded[: len(data)] = data
    return padded.view(np.uint64)


# ---------------------------------------------------------------- the format


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
