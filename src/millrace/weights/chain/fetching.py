"""How a relay fetches a version: it asks one relay after another for the missing chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import xxhash

from millrace.core.digest import TensorSpec, published_digest
from millrace.core.errors import (
    DigestMismatchError,
    TornVersionError,
    UnknownVersionError,
    WeightsError,
    leaves,
)
from millrace.weights.chain.holding import ChunkedVersion, SlotTaken
from millrace.weights.chain.nixl.link import NIXL, Agent, Pull, Pulls
from millrace.weights.chain.sending import DELTA
from millrace.weights.chain.wire import (
    Chunk,
    ChunkChecksum,
    Identity,
    Link,
    LinkDeadlines,
    Unknown,
    VersionOffer,
    VersionRequest,
    Waiting,
    Want,
    as_bytes,
    connected,
)
from millrace.weights.delta_coding import HEAD, RAW, apply, kind_of
from millrace.weights.manifest import decode_manifest, in_order


class Order(msgspec.Struct, frozen=True):
    """One version to fetch. `begin` gives its slot, new or with chunks of the version. `base` gives the
    complete version here that the deltas are made against; None: this relay lacks it. `agent` pulls raw
    chunks."""

    request: VersionRequest
    slot_bytes: int
    begin: Callable[[list[TensorSpec]], ChunkedVersion]
    base: Callable[[tuple[int, str], ChunkedVersion], ChunkedVersion | None]
    identity: Identity
    deadlines: LinkDeadlines
    agent: Agent | None = None


async def fetch(
    order: Order, sources: Sequence[str], ours: ChunkedVersion | None
) -> tuple[ChunkedVersion, str]:
    """Fetch the version, and check every block. Returns it, and the address of its source. `ours`: the
    version here. If `ours` has every chunk, no source is asked.

    If a source fails, the next source is asked for the missing chunks. Chunks that arrived stay, even if all
    sources fail.

    Raises:
        DigestMismatchError: the bytes that arrived differ from the published bytes.
        UnknownVersionError: no source has the version.
        TornVersionError: another version took the slot here.
        WeightsError: no source answers. Every error names each source and its answer.
    """
    if ours is not None and ours.here.all():
        for block in ours.unchecked():
            await ours.check_block(block)
        return ours, ""
    failures: list[WeightsError] = []
    for address in sources:
        try:
            return await _fetch_from(address, order), address
        except SlotTaken:
            raise
        except WeightsError as error:
            failures.append(error)
    raise _verdict(order.request, failures)


async def _fetch_from(address: str, order: Order) -> ChunkedVersion:
    async with connected(address, order.identity, order.deadlines) as link:
        await link.send(order.request)
        manifest, offer = await _receive_offer(link, order)
        chunked = order.begin(manifest)
        base = offer.base and order.base(offer.base, chunked)
        with _pulling(link, order, offer.agent) as pull:
            await link.send(Want(np.packbits(~chunked.here).tobytes(), deltas=base is not None))
            try:
                async with asyncio.TaskGroup() as checks:
                    for block in chunked.unchecked():
                        checks.create_task(chunked.check_block(block))
                    await _receive_chunks(link, (chunked, base), pull, order.deadlines, checks)
            except BaseExceptionGroup as group:
                raise next(leaves(group)) from None
        return chunked


async def _receive_offer(link: Link, order: Order) -> tuple[list[TensorSpec], VersionOffer]:
    """The manifest, and its offer. The manifest has the digests of all blocks, so it must be the
    trainer's."""
    match await link.receive():
        case VersionOffer(encoded) as offer:
            manifest = in_order(decode_manifest(encoded, order.slot_bytes, f"of the relay at {link.peer}"))
            if (digest := published_digest(manifest)) != order.request.digest:
                raise DigestMismatchError(
                    f"the manifest of version {order.request.version} from {link.peer} has digest {digest}, "
                    f"and the trainer's has {order.request.digest}"
                )
            return manifest, offer
        case Unknown(reason):
            raise UnknownVersionError(f"the relay at {link.peer} says: {reason}")
        case other:
            raise _astray(link, other)


@contextmanager
def _pulling(link: Link, order: Order, metadata: bytes) -> Iterator[Pull | None]:
    """The function that pulls raw chunks; None: raw chunks come over the link."""
    if order.agent is None:
        yield None
        return
    if not metadata:
        raise WeightsError(
            f"the relay at {link.peer} has no NIXL, and this one pulls through it: `weights.transport` must "
            "be the same for all relays of a run"
        )
    with order.agent.source(metadata, link.peer, order.deadlines.stall_s) as pull:
        yield pull


async def _receive_chunks(
    link: Link,
    versions: tuple[ChunkedVersion, ChunkedVersion | None],
    pull: Pull | None,
    deadlines: LinkDeadlines,
    checks: asyncio.TaskGroup,
) -> None:
    """Receive until every chunk is here. A complete block is checked while later chunks arrive. `versions`:
    the version that arrives, and the base of its deltas."""
    chunked, base = versions
    now = asyncio.get_running_loop().time
    arrived_s = now()

    def arrived(index: int, checksum: int | None) -> None:
        coming[index] = True
        if (block := chunked.arrived(index, checksum)) is not None:
            checks.create_task(chunked.check_block(block))

    pulls = None if pull is None else Pulls(link, chunked, pull, tasks=checks, arrived=arrived)
    coming = chunked.here if pulls is None else pulls.coming
    while not coming.all():
        match await link.receive():
            case Chunk() as chunk if not 0 <= chunk.index < len(chunked.chunks) or coming[chunk.index]:
                raise _astray(link, chunk)
            case Chunk(encoding=encoding) as chunk if pulls is not None and encoding == NIXL:
                if chunk.num_bytes != chunked.chunks[chunk.index].size:
                    raise _astray(link, chunk)
                pulls.begin(chunk)
                arrived_s = now()
            case Chunk() as chunk:
                arrived(chunk.index, await _receive_chunk(link, chunked, base, chunk))
                arrived_s = now()
            case Waiting(reached_bytes):
                arrived_s = now() if chunked.goes_on_upstream(reached_bytes) else arrived_s
                if now() - arrived_s > deadlines.wait_s:
                    raise WeightsError(
                        f"the relay at {link.peer} itself waits, for more than {deadlines.wait_s:g} s, and "
                        "nothing arrives there"
                    )
            case Unknown(reason):
                raise UnknownVersionError(f"the relay at {link.peer} says: {reason}")
            case other:
                raise _astray(link, other)
    if pulls is not None:
        await pulls.end(deadlines.heartbeat_s)


async def _receive_chunk(
    link: Link, chunked: ChunkedVersion, base: ChunkedVersion | None, chunk: Chunk
) -> int | None:
    """Receive a chunk. Raw bytes go directly to their place, if the place is contiguous. Returns the raw
    chunk's checksum, which is right; None: the chunk was a delta."""
    place = chunked.chunks[chunk.index]
    raw = chunk.encoding == RAW and chunk.num_bytes == place.size
    delta = chunk.encoding == DELTA and HEAD.size <= chunk.num_bytes <= place.size + HEAD.size
    if not raw and (base is None or not delta):
        raise _astray(link, chunk)
    chunked.check_slot()
    direct = place.flags.c_contiguous and not chunked.writers
    target = place if direct else np.empty(place.shape, np.uint8)
    arrived = target if raw else np.empty(chunk.num_bytes, np.uint8)
    await link.receive_into(as_bytes(arrived), chunked.receives)
    chunked.received_bytes += chunk.num_bytes
    match await link.receive():
        case ChunkChecksum(None):
            raise TornVersionError(f"the relay at {link.peer} has overwritten version {chunked.version}")
        case ChunkChecksum(digest) if digest == xxhash.xxh3_64_intdigest(as_bytes(arrived)):
            chunked.encodings[RAW if raw else kind_of(arrived)] += 1
            chunked.decoded_bytes += place.size
            if not raw and base is not None:
                apply(arrived, np.ascontiguousarray(base.chunks[chunk.index]), target)
            if target is not place:
                chunked.check_slot()
                place[...] = target
            return digest if raw else None
        case ChunkChecksum():
            raise DigestMismatchError(
                f"{chunked.chunk_name(chunk.index)} of version {chunked.version} was changed on its way from "
                f"{link.peer}"
            )
        case other:
            raise _astray(link, other)


def _astray(link: Link, message: object) -> WeightsError:
    return WeightsError(f"the relay at {link.peer} does not keep the protocol: it says {str(message)[:200]}")


def _verdict(request: VersionRequest, failures: Sequence[WeightsError]) -> WeightsError:
    """One error for all sources. A wrong digest outweighs a missing version, which outweighs silence."""
    reasons = "; ".join(str(failure) for failure in failures) or "no source was named"
    text = f"weights version {request.version} cannot be fetched: {reasons}"
    if any(isinstance(failure, DigestMismatchError) for failure in failures):
        return DigestMismatchError(text)
    if any(isinstance(failure, UnknownVersionError | TornVersionError) for failure in failures):
        return UnknownVersionError(text)
    return WeightsError(f"{text}. No source answers: are these hosts up, and reached from here?")
