"""Chunks through NIXL (`weights.transport = "nixl"`): the receiver pulls chunks from the source's memory.

The link of `wire` stays the control channel. It carries the proofs, the manifest, deltas, and announcements.
Only the bytes of raw chunks go through NIXL:

    source     VersionOffer, with the metadata of its NIXL agent
    source     Chunk(address, checksum) for each chunk as soon as it is here; Waiting, Unknown as over TCP
    receiver   Waiting, while it pulls announced chunks
    receiver   Taken, when all chunks are here, or when a pulled chunk has a wrong checksum
    source     after a wrong checksum: ChunkChecksum(None), if the version was overwritten; else ChunkChecksum

The source registers its slots once. A pull writes into a buffer of the receiver, not into its slot. NIXL
cannot cancel a pull, so an abandoned pull may still write at any time. Its buffer is not used again until the
pull has ended. The receiver copies a chunk with the right checksum to the slot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, reduce
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from millrace.core.errors import (
    ConfigError,
    DigestMismatchError,
    TornVersionError,
    WeightsError,
    boundary,
)
from millrace.core.extras import refuse_missing
from millrace.weights.chain.holding import CHUNK_BYTES_MAX, ChunkedVersion
from millrace.weights.chain.wire import Chunk, ChunkChecksum, Link, Taken, Unknown, Waiting, as_bytes
from millrace.weights.layout import Bytes, Memory

NIXL = "nixl"
BACKEND = "UCX"
AHEAD = 4  # pulls at the same time
ABANDONED_MAX = 4 * AHEAD  # abandoned pulls that have not ended
LOOK_S = 0.0005  # NIXL sends no wake-up, so the relay looks
DONE, UNDER_WAY = "DONE", "PROC"

Pull = Callable[[Bytes, int, Callable[[Bytes], None]], Awaitable[None]]
"""Pull the bytes at a source's address that have the strides of a place here. The function gets a buffer with
the bytes, which is valid only during the call."""


def refuse_without_nixl() -> None:
    """Raises: ConfigError: NIXL is not installed."""
    refuse_missing("nixl", '`weights.transport` ("nixl")', "leave the key at tcp")


def make_agent(name: str) -> Any:
    """An agent of NIXL. Raises: ConfigError: NIXL is not installed, or does not work here."""
    refuse_without_nixl()
    with boundary(f"relay `{name}`", '`weights.transport` ("nixl"): make an agent of NIXL', ConfigError):
        from nixl._api import nixl_agent, nixl_agent_config

        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        unique = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        # The agent's thread would poll without a pause, and use a core during the relay's life.
        agent = nixl_agent(unique, nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
        if BACKEND not in agent.backends:
            raise RuntimeError(f"its backend {BACKEND} is missing, it has {agent.get_plugin_list()}")
        return agent


class Agent:
    """A relay's end of NIXL, used by one thread at a time.

    Attributes: metadata: with it other relays pull from the slots of this relay
    Raises: ConfigError: no NIXL, or the slots cannot be registered.
    """

    def __init__(self, name: str, memory: Memory) -> None:
        self._nixl = make_agent(name)
        self._sources = dict[bytes, str]()  # names by metadata: of the present source and of abandoned pulls
        self._free, self._abandoned = list[Bytes](), list[tuple[str, Any, Bytes]]()
        with boundary(f"relay `{name}`", '`weights.transport` ("nixl"): register its slots', ConfigError):
            memory.register_areas(self._register)
            self.metadata: bytes = self._nixl.get_agent_metadata()  # of the slots, not of the buffers

    @contextmanager
    def source(self, metadata: bytes, peer: str, within_s: float) -> Iterator[Pull]:
        """The function that pulls from another relay, until exit.

        Raises: WeightsError, also from each pull: NIXL fails, or a pull has not ended `within_s`.
        """
        with boundary(f"the relay at {peer}", "meet it through NIXL", WeightsError):
            name = self._sources.get(metadata) or self._nixl.add_remote_agent(metadata)
        self._sources[metadata] = name

        async def pull(place: Bytes, address: int, keep: Callable[[Bytes], None]) -> None:
            with boundary(f"the relay at {peer}", "pull from it through NIXL", WeightsError):
                await self._pull(name, (place, address), within_s, keep)

        try:
            yield pull
        finally:
            self._reclaim()
            for key, source in list(self._sources.items()):
                if source not in {of for of, _, _ in self._abandoned}:
                    del self._sources[key]
                    with suppress(Exception):  # the source may be gone already
                        self._nixl.remove_remote_agent(source)

    async def progress(self) -> None:
        """Call NIXL so that pulls from this relay go on. With RDMA only the start of a pull needs the calls,
        without RDMA all of its bytes. Ends when it is cancelled."""
        while True:
            self._nixl.get_new_notifs()
            await asyncio.sleep(LOOK_S)

    async def _pull(
        self, source: str, target: tuple[Bytes, int], within_s: float, keep: Callable[[Bytes], None]
    ) -> None:
        now, buffer = asyncio.get_running_loop().time, self._take()
        until_s, handle, state = now() + within_s, None, UNDER_WAY
        try:
            handle = self._begin(source, *target, buffer)
            state = self._nixl.transfer(handle)
            while state == UNDER_WAY:
                if now() > until_s:
                    raise TimeoutError(f"it has not ended within {within_s:g} s")
                await asyncio.sleep(LOOK_S)
                state = self._state(handle)
            if state != DONE:
                raise ConnectionError(state)
            keep(buffer[: target[0].size])
        finally:
            if handle is not None and state == UNDER_WAY:
                self._abandoned.append((source, handle, buffer))
            else:
                self._free.append(buffer)

    def _begin(self, source: str, place: Bytes, address: int, buffer: Bytes) -> Any:
        there = _runs(place, address)
        here = there.copy()
        here[:, 0] = buffer.ctypes.data + np.arange(len(here), dtype=np.uint64) * there[0, 1]
        descs = [self._nixl.get_xfer_descs(each, "DRAM") for each in (here, there)]
        return self._nixl.initialize_xfer("READ", *descs, source)

    def _state(self, handle: Any) -> str:
        try:
            return str(self._nixl.check_xfer_state(handle))
        except Exception as error:  # any error of NIXL means that the pull has ended
            return f"{type(error).__name__}: {error}"

    def _reclaim(self) -> None:
        """Free the buffers of abandoned pulls that have ended. NIXL knows a pull's state while it knows its
        source."""
        abandoned, self._abandoned = self._abandoned, []
        for source, handle, buffer in abandoned:
            if self._state(handle) == UNDER_WAY:
                self._abandoned.append((source, handle, buffer))
            else:
                self._free.append(buffer)

    def _take(self) -> Bytes:
        """A buffer that no pull writes. Raises: WeightsError: abandoned pulls have too many buffers."""
        self._reclaim()
        if not self._free:
            if len(self._abandoned) >= ABANDONED_MAX:
                raise WeightsError(f"{ABANDONED_MAX} pulls through NIXL never ended here: restart this relay")
            self._free.append(np.zeros(CHUNK_BYTES_MAX, np.uint8))
            self._register(self._free[-1])
        return self._free.pop()

    def _register(self, data: Bytes) -> Callable[[], None]:
        descs = self._nixl.register_memory([(data.ctypes.data, data.size, 0, "")], "DRAM")
        return lambda: self._nixl.deregister_memory(descs)


class Pulls:
    """Pulls the announced chunks, `AHEAD` at a time. Copies a chunk with the right checksum to its place.

    Args:
        pull: pulls from this source.
        tasks: owner of the pulls.
        arrived: called with each chunk in its place: index, checksum.
    Attributes:
        coming: (chunks,) bool: the chunk is here, or announced
    """

    def __init__(
        self,
        link: Link,
        chunked: ChunkedVersion,
        pull: Pull,
        *,
        tasks: asyncio.TaskGroup,
        arrived: Callable[[int, int], None],
    ) -> None:
        self._link, self._holding, self._pull, self._arrived = link, chunked, pull, arrived
        self._queue = asyncio.Queue[Chunk | None]()  # at most all chunks
        self._wrong, self._announced = list[int](), 0
        self._under_way, self._began_s, self._busy_s, self._pulled_bytes = 0, 0.0, 0.0, 0
        self.coming = chunked.here.copy()
        self._workers = [tasks.create_task(self._work()) for _ in range(AHEAD)]

    def begin(self, chunk: Chunk) -> None:
        self.coming[chunk.index] = True
        self._announced += 1
        self._queue.put_nowait(chunk)

    async def end(self, heartbeat_s: float) -> None:
        """Wait until all announced chunks are here, and tell the source.

        Raises: TornVersionError, DigestMismatchError: a chunk has a wrong checksum.
        """
        for _ in self._workers:
            self._queue.put_nowait(None)
        while (await asyncio.wait(self._workers, timeout=heartbeat_s))[1]:
            await self._link.send(Waiting())
        taken = Taken(bool(self._wrong), self._pulled_bytes / self._busy_s if self._busy_s else 0.0)
        if self._wrong:
            await self._link.send(taken)
            await self._raise_wrong(self._wrong[0])
        elif self._announced:
            with suppress(WeightsError):  # the source may be gone: all its chunks are here
                await self._link.send(taken)

    async def _work(self) -> None:
        """Consumes announced chunks; ends with a None. After a wrong chunk it pulls no more."""
        now = asyncio.get_running_loop().time
        while (chunk := await self._queue.get()) is not None:
            if self._wrong:
                continue
            if not self._under_way:
                self._began_s = now()
            self._under_way += 1
            place = self._holding.chunks[chunk.index]
            await self._pull(place, chunk.address, partial(self._keep, chunk))
            self._under_way -= 1
            if not self._under_way:
                self._busy_s += now() - self._began_s

    def _keep(self, chunk: Chunk, data: Bytes) -> None:
        self._holding.check_slot()
        if xxhash.xxh3_64_intdigest(as_bytes(data)) != chunk.checksum:
            self._wrong.append(chunk.index)
            return
        place = self._holding.chunks[chunk.index]
        place[...] = data.reshape(place.shape)
        self._pulled_bytes += place.size
        self._holding.received_bytes += place.size
        self._holding.decoded_bytes += place.size
        self._holding.encodings[NIXL] += 1
        self._arrived(chunk.index, chunk.checksum)

    async def _raise_wrong(self, index: int) -> None:
        match await self._link.receive():
            case ChunkChecksum(None):
                raise TornVersionError(
                    f"the relay at {self._link.peer} has overwritten version {self._holding.version}"
                )
            case _:
                raise DigestMismatchError(
                    f"{self._holding.chunk_name(index)} of version {self._holding.version} was changed on "
                    f"its way from {self._link.peer}"
                )


async def announce(link: Link, chunked: ChunkedVersion, index: int) -> bool:
    """As a source: announce a chunk. False: the chunk was overwritten, and the receiver was told.

    The checksum is the one that the chunk arrived with. A checksum computed here is of intact bytes, because
    the slot's sequence is read afterwards.
    """
    place = chunked.chunks[index]
    checksum = chunked.checksums.get(index)
    if checksum is None:
        checksum = xxhash.xxh3_64_intdigest(as_bytes(np.ascontiguousarray(place)))
    if not chunked.intact:
        await link.send(Unknown(f"weights version {chunked.version} was overwritten here"))
        return False
    chunked.checksums[index] = checksum
    await link.send(Chunk(index, NIXL, place.size, place.ctypes.data, checksum))
    return True


async def until_taken(link: Link, chunked: ChunkedVersion) -> float:
    """As a source: wait until the receiver has all announced chunks. Returns the bytes/s of its pulls.

    Raises: WeightsError: the receiver is gone, or silent.
    """
    while True:
        match await link.receive():
            case Waiting():
                continue
            case Taken(wrong, bytes_s):
                if wrong:
                    await link.send(ChunkChecksum(0 if chunked.intact else None))
                return bytes_s
            case other:
                raise WeightsError(f"the relay at {link.peer} does not keep the protocol: it says {other}")


def _runs(place: Bytes, address: int) -> NDArray[np.uint64]:
    """(runs, 3): address, bytes and device of each contiguous run of bytes."""
    if place.flags.c_contiguous:
        return np.array([(address, place.size, 0)], np.uint64)
    offsets = [
        np.arange(size) * stride for size, stride in zip(place.shape[:-1], place.strides[:-1], strict=True)
    ]
    starts = reduce(np.add.outer, offsets).ravel()
    runs = np.zeros((starts.size, 3), np.uint64)
    runs[:, 0], runs[:, 1] = address + starts, place.shape[-1]
    return runs
