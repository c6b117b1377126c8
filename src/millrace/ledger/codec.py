"""Tokens as bytes. Reading gives bit for bit what was written.

A growing trajectory is written plainly and often; a finished trajectory is squeezed and written once. The
plain form has the columns as they are: int32 ids, then float32 log-probs, little-endian. The squeezed form
has byte planes (all lowest bytes first), which zstd compresses about 15 % better. The first byte names the
form. Ids and log-probs of the top log-probs follow those of the sampled tokens. Forks, experts and token
masks, if there are any, come first: a byte that marks them, their number of bytes, and the bytes: of forks
msgpack, of experts compressed or plain, of token masks their counts and ids in one of the two forms.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import zstandard

from millrace.core.completion.columns import TokenColumns
from millrace.core.completion.routing import Routing
from millrace.core.completion.top_logprobs import TopLogprobs
from millrace.core.errors import LedgerError
from millrace.core.turns.turn_bounds import UNBOUNDED, EpisodeBounds

_PLAIN, _SQUEEZED, _TOKEN_MASKS, _ROUTING, _FORKS = b"p", b"z", b"c", b"r", b"f"
_BOUNDS = 0
"""The key of the bounds of turns, among the metrics of a trajectory."""

PLAIN_BYTES_MAX = 1 << 28
"""The most of one trajectory: a million tokens, with 30 top log-probs each."""

# Making a compressor costs ten times its use. Only the one writing thread of a ledger compresses. Level 3
# would take 1.6 times as long, for 1 % fewer bytes.
_COMPRESSOR = zstandard.ZstdCompressor(level=1, write_checksum=True)
_DECOMPRESSOR = zstandard.ZstdDecompressor()


def pack_plain(columns: TokenColumns) -> bytes:
    """The plain form, which is cheap to write."""
    ids, logprobs = _with_top_logprobs(columns)
    first = _first_parts(columns, lambda data: _PLAIN + data, _little)
    return first + _PLAIN + _little(ids) + _little(logprobs)


def pack_squeezed(columns: TokenColumns) -> bytes:
    """The squeezed form, which is cheap to keep."""
    ids, logprobs = _with_top_logprobs(columns)
    return _first_parts(columns, _squeeze, _planes) + _squeeze(_planes(ids) + _planes(logprobs))


def pack_prompt(tokens: array[int]) -> bytes:
    return _squeeze(_planes(tokens))


def unpack_columns(data: bytes, versions: bytes) -> TokenColumns:
    """The reverse of `pack_plain`, `pack_squeezed` and `pack_versions`. Raises LedgerError."""
    with _decoding("tokens"):
        runs = version_runs(versions)
        end = 4 * sum(count for _, count in runs)
        forked, data = _first_of(data, _FORKS)
        forks = msgspec.msgpack.decode(forked, type=list[tuple[int, int, int]]) if forked else ()
        experts, data = _first_of(data, _ROUTING)
        routing = Routing.from_bytes(_plain(experts)) if experts else None
        token_masks, data = _token_masks_of(data, end)
        ids, logprobs = map(_native, _halves(data))
        behind = array("i", ids[end:]), array("f", logprobs[end:])
        top_logprobs = TopLogprobs(len(ids[end:]) // (end or 1), *behind) if len(ids) > end else None
        buffers = ids[:end], logprobs[:end]
        return TokenColumns.from_buffers(*buffers, runs, top_logprobs, token_masks, routing, forks)


def unpack_prompt(data: bytes) -> array[int]:
    """Raises LedgerError."""
    with _decoding("prompt"):
        tokens = array("i")
        tokens.frombytes(_native(_from_planes(_unsqueeze(data))))
        return tokens


def with_bounds(metrics: Mapping[str, float], bounds: EpisodeBounds) -> Mapping[Any, Any]:
    """The metrics of a trajectory and the bounds of its turns as one table: metrics have names."""
    return metrics if bounds == UNBOUNDED else {**metrics, _BOUNDS: bounds}


def unpack_metrics(blob: bytes) -> tuple[dict[str, float], EpisodeBounds]:
    """The reverse of `with_bounds`. Raises LedgerError."""
    with _decoding("metrics"):
        metrics = msgspec.msgpack.decode(blob)
        return metrics, msgspec.convert(metrics.pop(_BOUNDS, UNBOUNDED), EpisodeBounds)


def pack_versions(runs: Sequence[tuple[int, int]]) -> bytes:
    return msgspec.msgpack.encode(runs)


def version_runs(blob: bytes) -> list[tuple[int, int]]:
    """(version, how many tokens in a row), in order of position. Raises LedgerError."""
    with _decoding("versions"):
        return msgspec.msgpack.decode(blob, type=list[tuple[int, int]])


def _with_top_logprobs(columns: TokenColumns) -> tuple[array[int], array[float]]:
    top_logprobs = columns.top_logprobs
    if top_logprobs is None:
        return columns.tokens, columns.logprobs
    return columns.tokens + top_logprobs.tokens, columns.logprobs + top_logprobs.logprobs


def _first_parts(
    columns: TokenColumns, packed: Callable[[bytes], bytes], written: Callable[[array[int]], bytes]
) -> bytes:
    forks, routing, token_masks = columns.forks, columns.routing, columns.token_masks
    parts = _marked(_FORKS, msgspec.msgpack.encode(forks)) if forks else b""
    if routing is not None:
        parts += _marked(_ROUTING, packed(routing.to_bytes()))
    if token_masks is not None:
        parts += _marked(_TOKEN_MASKS, packed(written(token_masks.counts + token_masks.tokens)))
    return parts


def _marked(mark: bytes, data: bytes) -> bytes:
    return mark + len(data).to_bytes(8, "little") + data


def _first_of(data: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """The marked bytes that come first, empty without them, and the bytes after them."""
    if data[:1] != mark:
        return b"", data
    behind = 9 + int.from_bytes(data[1:9], "little")
    return data[9:behind], data[behind:]


def _plain(data: bytes) -> bytes:
    return data[1:] if data[:1] == _PLAIN else _unsqueeze(data)


def _token_masks_of(data: bytes, end: int) -> tuple[tuple[bytes, bytes] | None, bytes]:
    """The bytes of counts and ids, and the bytes after them. `end`: bytes of the counts."""
    own, data = _first_of(data, _TOKEN_MASKS)
    if not own:
        return None, data
    values = _native(own[1:] if own[:1] == _PLAIN else _from_planes(_unsqueeze(own)))
    return (values[:end], values[end:]), data


def _halves(data: bytes) -> tuple[bytes, bytes]:
    """The bytes of the ids and of the log-probs."""
    if data[:1] == _PLAIN:
        half = 1 + len(data) // 2
        return data[1:half], data[half:]
    planes = _unsqueeze(data)
    half = len(planes) // 2
    return _from_planes(planes[:half]), _from_planes(planes[half:])


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    """Raises LedgerError for bytes that do not decode: the file was damaged, or another program wrote it."""
    try:
        yield
    except (msgspec.MsgspecError, zstandard.ZstdError, ValueError, TypeError, MemoryError) as error:
        raise LedgerError(
            f"a trajectory's {what} are damaged in the ledger: {error}\n"
            "  Restore the file from a backup, or start a new run from the newest checkpoint."
        ) from error


def _squeeze(planes: bytes) -> bytes:
    return _SQUEEZED + _COMPRESSOR.compress(planes)


def _unsqueeze(data: bytes) -> bytes:
    if data[:1] != _SQUEEZED:
        raise ValueError(f"the first byte is {data[:1]!r}")
    plain = zstandard.frame_content_size(data[1:19])
    if plain > PLAIN_BYTES_MAX:
        raise ValueError(f"they would be {plain:,} bytes")
    return _DECOMPRESSOR.decompress(memoryview(data)[1:])


def _little(values: array[Any]) -> bytes:
    return _native(values.tobytes())


def _native(data: bytes) -> bytes:
    """Converts between little-endian and this machine's byte order."""
    if sys.byteorder == "little":
        return data
    swapped = array("i", data)
    swapped.byteswap()
    return swapped.tobytes()


def _planes(values: array[Any]) -> bytes:
    return np.frombuffer(_little(values), np.uint8).reshape(-1, 4).T.tobytes()


def _from_planes(planes: bytes) -> bytes:
    return np.frombuffer(planes, np.uint8).reshape(4, -1).T.tobytes()
