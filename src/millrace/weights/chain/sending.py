"""A relay's answer to another one that asks for a version."""

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
from millrace.weights.chain.holding import Holding
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
from millrace.weights.delta.coding import encode, kind_of
from millrace.weights.delta.packed import RAW
from millrace.weights.layout import Bytes

Give = Callable[[Link, Holding, int], Awaitable[bool]]
"""How a raw chunk gets to who wants it. False: it was overwritten, and who asked is told."""

DELTA = "delta"
SAMPLE = 256
LOOK_S = 0.05  # what ranks of this host write wakes nobody
ENCODED_MAX = 2  # chunks that wait to be sent, while the next one is encoded
TELLING_BYTES = 1 << 20  # sent raw: from so many on, it is seen what the link carries


class VersionSource(Protocol):
    """What a relay has of versions. `news` fires when there is another one."""

    news: Pulse

    def find(self, version: int, digest: str) -> Holding | None:
        """Whole, or arriving."""

    def base(self, held: Iterable[tuple[int, str]], like: Holding) -> Holding | None:
        """The newest whole one of `held` whose chunks are those of `like`."""

    def present(self) -> list[tuple[int, str]]:
        """Whole ones: (version, published digest)."""


async def answer(
    link: Link, shelf: VersionSource, deadlines: LinkDeadlines, rates: dict[str, float], agent: bytes = b""
) -> None:
    """Serve one request: the manifest, then every chunk that is wanted, as soon as it is here.

    Who has an earlier version gets deltas against it, unless its link is faster than they are encoded.

    Args:
        rates: bytes/s that links to other hosts carried; it is kept up to date.
        agent: what who asks needs to pull raw chunks through NIXL; empty: they go over the link.
    Raises: WeightsError: the link failed, or its other side does not keep the protocol.
    """
    ask = await link.receive()
    if not isinstance(ask, VersionRequest):
        raise WeightsError(f"the relay at {link.peer} asks for nothing: it says {ask}")
    holding = await _awaited(shelf, ask, deadlines.begin_s)
    if holding is None:
        present = ", ".join(f"{version} ({digest})" for version, digest in shelf.present())
        reason = f"weights version {ask.version} ({ask.digest}) is not here (present: {present or 'none'})"
        return await link.send(Unknown(reason))
    base = shelf.base(ask.held, holding)
    told = None if base is None else (base.version, base.digest)
    await link.send(VersionOffer(msgspec.msgpack.encode(holding.manifest), told, agent if ask.pulls else b""))
    want = await link.receive()
    if not isinstance(want, Want):
        raise WeightsError(f"the relay at {link.peer} wants nothing: it says {want}")
    bits = np.unpackbits(np.frombuffer(want.chunks, np.uint8), count=len(holding.chunks)).astype(bool)
    due = _due(holding, bits, deadlines.heartbeat_s)
    host = link.peer.rpartition(":")[0]
    pulled = ask.pulls and bool(agent)
    give = announce if pulled else _send_chunk
    if base is not None and want.deltas:
        raw_bytes = await _send_deltas(link, holding, base, due, rates.get(host, 0.0), give)
    else:
        raw_bytes = await _send_chunks(link, holding, due, give)
    rate = await until_taken(link, holding) if pulled and raw_bytes else link.carried_bytes_s()
    if raw_bytes >= TELLING_BYTES:
        rates[host] = rate


async def _awaited(shelf: VersionSource, ask: VersionRequest, begin_s: float) -> Holding | None:
    """Who asks may have been told of the version a moment before this relay is."""
    deadline_s = asyncio.get_running_loop().time() + begin_s
    while (holding := shelf.find(ask.version, ask.digest)) is None:
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            return None
        await shelf.news.wait(min(left_s, LOOK_S))
    return holding


async def _due(
    holding: Holding, wanted: NDArray[np.bool_], heartbeat_s: float
) -> AsyncIterator[int | Message]:
    """What is to be sent next: a chunk that is here, that the next one is not here yet, or never will be."""
    while wanted.any():
        ready = wanted & holding.here
        if ready.any():
            index = int(ready.argmax())
            wanted[index] = False
            yield index
        elif holding.ended or not holding.intact:
            why = holding.ended or "its slot was taken"
            yield Unknown(f"weights version {holding.version} stopped to arrive here: {why}")
            return
        elif not await holding.news.wait(heartbeat_s):
            yield Waiting()


async def _send_chunks(link: Link, holding: Holding, due: AsyncIterator[int | Message], give: Give) -> int:
    """All of them raw. Returns how many bytes that were."""
    raw_bytes = 0
    async for what in due:
        if not isinstance(what, int):
            await link.send(what)
        elif not await give(link, holding, what):
            break
        else:
            raw_bytes += holding.chunks[what].size
    return raw_bytes


async def _send_deltas(
    link: Link, holding: Holding, base: Holding, due: AsyncIterator[int | Message], rate: float, give: Give
) -> int:
    """Each chunk encoded while earlier ones are sent. Returns how many bytes went raw.

    Consumes what is due; waits for the link; ends with the last chunk, or when a slot was overwritten.
    """
    queue = asyncio.Queue[int | tuple[int, bytes] | Message | None](ENCODED_MAX)
    raw_bytes = 0

    async def encode_all() -> None:
        async for what in due:
            if isinstance(what, int) and base.intact and _alike(holding.chunks[what], base.chunks[what]):
                delta = await asyncio.to_thread(_delta, holding, base, what, rate)
                await queue.put((what, delta) if delta and holding.intact and base.intact else what)
            else:
                await queue.put(what)
        await queue.put(None)

    try:
        async with asyncio.TaskGroup() as tasks:
            encoding = tasks.create_task(encode_all())
            while (what := await queue.get()) is not None:
                if isinstance(what, tuple):
                    await _send_bytes(link, what[0], DELTA, what[1])
                elif not isinstance(what, int):
                    await link.send(what)
                elif await give(link, holding, what):
                    raw_bytes += holding.chunks[what].size
                else:
                    encoding.cancel()
                    break
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None
    return raw_bytes


def _alike(new: Bytes, old: Bytes) -> bool:
    """Whether of some bytes a tenth is as before: where all is new no delta is even tried. An odd step meets
    every byte of the elements."""
    step = new.size // SAMPLE | 1
    same = new.flat[::step] == old.flat[::step]
    return 10 * int(np.count_nonzero(same)) >= len(same)


def _delta(holding: Holding, base: Holding, index: int, rate: float) -> bytes:
    """Empty: the chunk is better sent as it is."""
    new, old = (np.ascontiguousarray(one.chunks[index]) for one in (holding, base))
    delta = encode(new, old, holding.width(index), link_bytes_s=rate)
    return b"" if kind_of(delta) == RAW else delta


async def _send_chunk(link: Link, holding: Holding, index: int) -> bool:
    """From where it lies, without a copy unless its rows lie apart. False: it was overwritten meanwhile, and
    who asked is told.

    Its seal is the one that it came with, so a change in this host's memory is found as one on the way is.
    """
    data = as_bytes(np.ascontiguousarray(holding.chunks[index]))
    await link.send(Chunk(index, RAW, len(data)))
    await link.send_bytes(data)
    checksum = holding.checksums.get(index)
    if checksum is None:
        checksum = holding.checksums[index] = xxhash.xxh3_64_intdigest(data)
    whole = holding.intact
    await link.send(ChunkChecksum(checksum if whole else None))
    if not whole:
        await link.send(Unknown(f"weights version {holding.version} was overwritten here"))
    return whole


async def _send_bytes(link: Link, index: int, encoding: str, data: bytes) -> None:
    await link.send(Chunk(index, encoding, len(data)))
    await link.send_bytes(memoryview(data))
    await link.send(ChunkChecksum(xxhash.xxh3_64_intdigest(data)))
