"""A relay's answer to another one that asks for a version."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
import numpy as np
import xxhash

from millrace.core.errors import WeightsError
from millrace.core.pulse import Pulse
from millrace.weights.holding import Holding
from millrace.weights.wire import Ask, Chunk, Deadlines, Found, Link, Seal, Unknown, Waiting, Want, as_bytes

RAW = "raw"


class Shelf(Protocol):
    """What a relay has of versions. `news` fires when there is another one."""

    news: Pulse

    def find(self, version: int, digest: str) -> Holding | None:
        """Whole, or arriving."""

    def present(self) -> list[tuple[int, str]]:
        """Whole ones: (version, published digest)."""


async def answer(link: Link, shelf: Shelf, deadlines: Deadlines) -> None:
    """Serve one request: the manifest, then every chunk that is wanted, as soon as it is here.

    Raises: WeightsError: the link failed, or its other side does not keep the protocol.
    """
    ask = await link.receive()
    if not isinstance(ask, Ask):
        raise WeightsError(f"the relay at {link.peer} asks for nothing: it says {ask}")
    holding = await _awaited(shelf, ask, deadlines.begin_s)
    if holding is None:
        present = ", ".join(f"{version} ({digest})" for version, digest in shelf.present())
        reason = f"weights version {ask.version} ({ask.digest}) is not here (present: {present or 'none'})"
        return await link.send(Unknown(reason))
    await link.send(Found(msgspec.msgpack.encode(holding.manifest)))
    want = await link.receive()
    if not isinstance(want, Want):
        raise WeightsError(f"the relay at {link.peer} wants nothing: it says {want}")
    bits = np.unpackbits(np.frombuffer(want.chunks, np.uint8), count=len(holding.chunks))
    await _send_chunks(link, holding, bits.astype(bool), deadlines.heartbeat_s)


async def _awaited(shelf: Shelf, ask: Ask, begin_s: float) -> Holding | None:
    """Who asks may have been told of the version a moment before this relay is."""
    deadline_s = asyncio.get_running_loop().time() + begin_s
    while (holding := shelf.find(ask.version, ask.digest)) is None:
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0 or not await shelf.news.wait(left_s):
            return shelf.find(ask.version, ask.digest)
    return holding


async def _send_chunks(link: Link, holding: Holding, wanted: np.ndarray, heartbeat_s: float) -> None:
    while wanted.any():
        ready = wanted & holding.here
        if ready.any():
            index = int(ready.argmax())
            wanted[index] = False
            if not await _send_chunk(link, holding, index):
                return await link.send(Unknown(f"weights version {holding.version} was overwritten here"))
        elif holding.ended or not holding.intact:
            why = holding.ended or "its slot was taken"
            return await link.send(
                Unknown(f"weights version {holding.version} stopped to arrive here: {why}")
            )
        elif not await holding.news.wait(heartbeat_s):
            await link.send(Waiting())


async def _send_chunk(link: Link, holding: Holding, index: int) -> bool:
    """From where it lies, without a copy unless its rows lie apart. False: it was overwritten meanwhile."""
    data = as_bytes(np.ascontiguousarray(holding.chunks[index]))
    await link.send(Chunk(index, RAW, len(data)))
    await link.send_bytes(data)
    digest = xxhash.xxh3_64_intdigest(data)
    whole = holding.intact
    await link.send(Seal(digest if whole else None))
    return whole
