"""Tokens as bytes: what is read is bit for bit what was written.

A growing trajectory is written plainly and often, a finished one squeezed and once. Squeezed, integers
are little-endian int32 and log-probs float32 where that is exact (what engines produce), else
float64, both byte plane by byte plane (all lowest bytes first), which zstd likes about 15 % better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import msgspec
import numpy as np
import zstandard

from millrace.core.errors import LedgerError

# Making one costs ten times what using it does. Only a ledger's one writing thread compresses.
_COMPRESSOR = zstandard.ZstdCompressor(level=3, write_checksum=True)
_DECOMPRESSOR = zstandard.ZstdDecompressor()


class _Packed(msgspec.Struct, array_like=True):
    """`logprobs_dtype` is empty where there are no log-probs (prompts)."""

    num_tokens: int
    logprobs_dtype: str
    planes: bytes


def pack_plain(tokens: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """Token ids and their log-probs: cheap to write."""
    return msgspec.msgpack.encode((tokens, logprobs))


def pack_squeezed(tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> bytes:
    """Token ids and, for completions, their log-probs: cheap to keep."""
    planes = _to_planes(np.asarray(tokens, "<i4"))
    dtype = ""
    if logprobs is not None:
        values = _smallest_exact(np.asarray(logprobs, "<f8"))
        dtype, planes = values.dtype.str, planes + _to_planes(values)
    packed = msgspec.msgpack.encode(_Packed(len(tokens), dtype, planes))
    return _COMPRESSOR.compress(packed)


def unpack_tokens(blob: bytes) -> tuple[list[int], list[float]]:
    """Whatever either packed; log-probs are empty where none were given. Raises LedgerError."""
    with _decoding("tokens"):
        if not blob.startswith(zstandard.FRAME_HEADER):
            return msgspec.msgpack.decode(blob, type=tuple[list[int], list[float]])
        return _unsqueezed(msgspec.msgpack.decode(_DECOMPRESSOR.decompress(blob), type=_Packed))


def _unsqueezed(packed: _Packed) -> tuple[list[int], list[float]]:
    split = 4 * packed.num_tokens
    tokens = _from_planes(packed.planes[:split], "<i4").tolist()
    if not packed.logprobs_dtype:
        return tokens, []
    return tokens, _from_planes(packed.planes[split:], packed.logprobs_dtype).tolist()


def pack_versions(versions: Sequence[int]) -> bytes:
    """Per-token versions as runs: nearly always one or two."""
    if versions and versions.count(versions[0]) == len(versions):
        return msgspec.msgpack.encode([(versions[0], len(versions))])
    return msgspec.msgpack.encode([(version, len(list(run))) for version, run in groupby(versions)])


def version_runs(blob: bytes) -> list[tuple[int, int]]:
    """(version, how many tokens in a row), in order of position. Raises LedgerError."""
    with _decoding("versions"):
        return msgspec.msgpack.decode(blob, type=list[tuple[int, int]])


def unpack_versions(blob: bytes) -> list[int]:
    return [version for version, count in version_runs(blob) for _ in range(count)]


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    """Bytes that are not what was packed: the file was damaged, or written by another program."""
    try:
        yield
    except (msgspec.MsgspecError, zstandard.ZstdError, ValueError, TypeError, MemoryError) as error:
        raise LedgerError(
            f"a trajectory's {what} are damaged in the ledger: {error}\n"
            "  Restore the file from a backup, or start a new run from the newest checkpoint."
        ) from error


def _smallest_exact(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    return narrow if np.array_equal(narrow, values) else values


def _to_planes(values: np.ndarray) -> bytes:
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(planes: bytes, dtype: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    rows = np.frombuffer(planes, np.uint8).reshape(size, -1).T
    return np.ascontiguousarray(rows).view(dtype).reshape(-1)
