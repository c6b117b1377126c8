"""A relay's answer to another relay's request for a version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from millrace.core.errors import WeightsError, leaves
from millrace.core.pulse import Pulse
from millrace.weights.chain.holding import ChunkedVersion
from millrace.weights.chain.nixl.link import announce, until_taken
from millrace.weights.chain.wire import (
    Chunk,
    ChunkChecksum,
    Link,
    LinkDeadlines,
    Message,
    Unknown,
    VersionOffer,
    VersionRequest,
    Waiting,
    Want,
    as_bytes,
)
from millrace.weights.delta_coding import RAW, encode, kind_of
from millrace.weights.layout import Bytes

Give = Callable[[Link, ChunkedVersion, int], Awaitable[bool]]
"""Sends a raw chunk to the receiver. False: the chunk was overwritten, and the receiver was told."""

DELTA = "delta"
SAMPLE = 256
LOOK_S = 0.05  # ranks of this host write without a wake-up, so the relay looks
ENCODED_MAX = 2  # encoded chunks that wait to be sent, while the next chunk is encoded
MEASURED_BYTES = 1 << 20  # the fewest bytes sent raw that measure the link's rate


class VersionSource(Protocol):
    """The versions of a relay. `news` fires when there is another version."""

    news: Pulse

    def find(self, version: int, digest: str) -> ChunkedVersion | None:
        """The version, complete or arriving."""

    def base(self, versions: Iterable[tuple[int, str]], like: ChunkedVersion) -> ChunkedVersion | None:
        """The newest of `versions` that is complete here and has the chunks of `like`."""

    def present(self) -> list[tuple[int, str]]:
        """Complete versions: (version, published digest)."""


async def answer(
    link: Link, versions: VersionSource, deadlines: LinkDeadlines, rates: dict[str, float], agent: bytes = b""
) -> None:
    """Serve one request: send the manifest, then each missing chunk as soon as the chunk is here.

    A receiver with an earlier version gets deltas against that version. A link that is faster than the
    encoding carries raw chunks.

    Args:
        rates: bytes/s that links to other hosts carried, by host; `answer` updates it.
        agent: metadata with which the receiver pulls raw chunks through NIXL; empty: they go over the link.
    Raises: WeightsError: the link failed, or the receiver does not keep the protocol.
    """
    request = await link.receive()
    if not isinstance(request, VersionRequest):
        raise WeightsError(f"the relay at {link.peer} asks for nothing: it says {request}")
    chunked = await _awaited(versions, request, deadlines.begin_s)
    if chunked is None:
        present = ", ".join(f"{version} ({digest})" for version, digest in versions.present()) or "none"
        reason = f"weights version {request.version} ({request.digest}) is not here (present: {present})"
        return await link.send(Unknown(reason))
    base = versions.base(request.complete, chunked)
    base_key = None if base is None else (base.version, base.digest)
    metadata = agent if request.pulls else b""
    await link.send(VersionOffer(msgspec.msgpack.encode(chunked.manifest), base_key, metadata))
    want = await link.receive()
    if not isinstance(want, Want):
        raise WeightsError(f"the relay at {link.peer} wants nothing: it says {want}")
    bits = np.unpackbits(np.frombuffer(want.chunks, np.uint8), count=len(chunked.chunks)).astype(bool)
    messages = _next_messages(chunked, bits, deadlines.heartbeat_s)
    host = link.peer.rpartition(":")[0]
    give = announce if metadata else _send_chunk
    if base is not None and want.deltas:
        raw_bytes = await _send_deltas(link, chunked, base, messages, rates.get(host, 0.0), give)
    else:
        raw_bytes = await _send_chunks(link, chunked, messages, give)
    rate = await until_taken(link, chunked) if metadata and raw_bytes else link.carried_bytes_s()
    if raw_bytes >= MEASURED_BYTES:
        rates[host] = rate


async def _awaited(versions: VersionSource, request: VersionRequest, begin_s: float) -> ChunkedVersion | None:
    """The version. The receiver may have heard of it a moment before this relay."""
    deadline_s = asyncio.get_running_loop().time() + begin_s
    while (chunked := versions.find(request.version, request.digest)) is None:
        remaining_s = deadline_s - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            return None
        await versions.news.wait(min(remaining_s, LOOK_S))
    return chunked


async def _next_messages(
    chunked: ChunkedVersion, missing: NDArray[np.bool_], heartbeat_s: float
) -> AsyncIterator[int | Message]:
    """The next messages: the index of a chunk that is here, `Waiting`, or `Unknown` if no more will
    arrive."""
    while missing.any():
        ready = missing & chunked.here
        if ready.any():
            index = int(ready.argmax())
            missing[index] = False
            yield index
        elif chunked.ended or not chunked.intact:
            reason = chunked.ended or "its slot was taken"
            yield Unknown(f"weights version {chunked.version} stopped to arrive here: {reason}")
            return
        elif not await chunked.news.wait(heartbeat_s):
            yield Waiting(chunked.reached_bytes)


async def _send_chunks(
    link: Link, chunked: ChunkedVersion, messages: AsyncIterator[int | Message], give: Give
) -> int:
    """Send all chunks raw. Returns the bytes sent."""
    raw_bytes = 0
    async for item in messages:
        if not isinstance(item, int):
            await link.send(item)
        elif not await give(link, chunked, item):
            break
        else:
            raw_bytes += chunked.chunks[item].size
    return raw_bytes


async def _send_deltas(
    link: Link,
    chunked: ChunkedVersion,
    base: ChunkedVersion,
    messages: AsyncIterator[int | Message],
    rate: float,
    give: Give,
) -> int:
    """Encode each chunk while earlier chunks are sent. Returns the bytes sent raw.

    Consumes `messages`; waits for the link; ends with the last chunk, or when a slot was overwritten.
    """
    queue = asyncio.Queue[int | tuple[int, bytes] | Message | None](ENCODED_MAX)
    raw_bytes = 0

    async def encode_all() -> None:
        async for item in messages:
            if isinstance(item, int) and base.intact and _similar(chunked.chunks[item], base.chunks[item]):
                delta = await asyncio.to_thread(_delta, chunked, base, item, rate)
                await queue.put((item, delta) if delta and chunked.intact and base.intact else item)
            else:
                await queue.put(item)
        await queue.put(None)

    try:
        async with asyncio.TaskGroup() as tasks:
            encoding = tasks.create_task(encode_all())
            while (item := await queue.get()) is not None:
                if isinstance(item, tuple):
                    await _send_delta(link, *item)
                elif not isinstance(item, int):
                    await link.send(item)
                elif await give(link, chunked, item):
                    raw_bytes += chunked.chunks[item].size
                else:
                    encoding.cancel()
                    break
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None
    return raw_bytes


def _similar(new: Bytes, old: Bytes) -> bool:
    """Whether at least a tenth of the sampled bytes are equal: else a delta is not worth an attempt. An odd
    stride samples every byte of the elements."""
    stride = new.size // SAMPLE | 1
    same = new.flat[::stride] == old.flat[::stride]
    return 10 * int(np.count_nonzero(same)) >= len(same)


def _delta(chunked: ChunkedVersion, base: ChunkedVersion, index: int, rate: float) -> bytes:
    """The chunk's delta against `base`. Empty: raw is better."""
    new, old = (np.ascontiguousarray(version.chunks[index]) for version in (chunked, base))
    delta = encode(new, old, chunked.width(index), link_bytes_s=rate)
    return b"" if kind_of(delta) == RAW else delta


async def _send_chunk(link: Link, chunked: ChunkedVersion, index: int) -> bool:
    """Send a chunk, without a copy if the chunk is contiguous. False: the chunk was overwritten, and the
    receiver was told.

    The checksum is the one that the chunk arrived with. So the receiver also finds a change in this host's
    memory.
    """
    data = as_bytes(np.ascontiguousarray(chunked.chunks[index]))
    await link.send(Chunk(index, RAW, len(data)))
    await link.send_bytes(data)
    checksum = chunked.checksums.get(index)
    if checksum is None:
        checksum = chunked.checksums[index] = xxhash.xxh3_64_intdigest(data)
    intact = chunked.intact
    await link.send(ChunkChecksum(checksum if intact else None))
    if not intact:
        await link.send(Unknown(f"weights version {chunked.version} was overwritten here"))
    return intact


async def _send_delta(link: Link, index: int, delta: bytes) -> None:
    await link.send(Chunk(index, DELTA, len(delta)))
    await link.send_bytes(memoryview(delta))
    await link.send(ChunkChecksum(xxhash.xxh3_64_intdigest(delta)))
