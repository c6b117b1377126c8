"""How a relay gets a version from others: from one after the other, what it still lacks."""

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
from millrace.weights.chain.holding import Holding, SlotTaken
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
from millrace.weights.delta.coding import apply, kind_of
from millrace.weights.delta.packed import HEAD, RAW
from millrace.weights.manifest import decode_manifest, in_order


class Order(msgspec.Struct, frozen=True):
    """One version to get. `begin` gives it a place, or the one where some of it is already. `base`: what is
    here of the version that its deltas are made against; None: nothing that they fit. `agent`: raw chunks are
    pulled with it."""

    ask: VersionRequest
    slot_bytes: int
    begin: Callable[[list[TensorSpec]], Holding]
    base: Callable[[tuple[int, str], Holding], Holding | None]
    own: Identity
    deadlines: LinkDeadlines
    agent: Agent | None = None


async def fetch(order: Order, sources: Sequence[str], ours: Holding | None) -> tuple[Holding, str]:
    """The version, with every piece checked, from the first of `sources` that has it, and from which. `ours`:
    what is here of it; where that is all, no source is asked.

    Where one fails, the next is asked for what still lacks. What is here stays here when all fail.

    Raises:
        DigestMismatchError: what arrived is not what was published.
        UnknownVersionError: no source has it.
        TornVersionError: its slot here was taken for another version.
        WeightsError: no source answers. All name every source, and what it said.
    """
    if ours is not None and ours.here.all():
        for piece in ours.unchecked():
            await ours.check_piece(piece)
        return ours, ""
    failures: list[WeightsError] = []
    for address in sources:
        try:
            return await _fetch_from(address, order), address
        except SlotTaken:
            raise
        except WeightsError as error:
            failures.append(error)
    raise _verdict(order.ask, failures)


async def _fetch_from(address: str, order: Order) -> Holding:
    async with connected(address, order.own, order.deadlines) as link:
        await link.send(order.ask)
        manifest, found = await _found(link, order)
        holding = order.begin(manifest)
        base = found.base and order.base(found.base, holding)
        with _pulling(link, order, found.agent) as pull:
            await link.send(Want(np.packbits(~holding.here).tobytes(), deltas=base is not None))
            try:
                async with asyncio.TaskGroup() as checks:
                    for piece in holding.unchecked():
                        checks.create_task(holding.check_piece(piece))
                    await _receive_chunks(link, (holding, base), pull, order.deadlines, checks)
            except BaseExceptionGroup as group:
                raise next(leaves(group)) from None
        return holding


async def _found(link: Link, order: Order) -> tuple[list[TensorSpec], VersionOffer]:
    """The manifest, and what it came with. It has the digests of all that will arrive, so it must be the
    trainer's."""
    match await link.receive():
        case VersionOffer(encoded) as answer:
            manifest = in_order(decode_manifest(encoded, order.slot_bytes, f"of the relay at {link.peer}"))
            if (found := published_digest(manifest)) != order.ask.digest:
                raise DigestMismatchError(
                    f"the manifest of version {order.ask.version} from {link.peer} has digest {found}, and "
                    f"the trainer's has {order.ask.digest}"
                )
            return manifest, answer
        case Unknown(reason):
            raise UnknownVersionError(f"the relay at {link.peer} says: {reason}")
        case other:
            raise _astray(link, other)


@contextmanager
def _pulling(link: Link, order: Order, metadata: bytes) -> Iterator[Pull | None]:
    """How raw chunks are pulled; None: they come over the link."""
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
    places: tuple[Holding, Holding | None],
    pull: Pull | None,
    deadlines: LinkDeadlines,
    checks: asyncio.TaskGroup,
) -> None:
    """Until every chunk is here. A piece that is whole is checked while the next ones arrive. `places`: of
    what arrives, and of what its deltas are made against."""
    holding, base = places
    now = asyncio.get_running_loop().time
    arrived_s = now()

    def arrived(index: int, checksum: int | None) -> None:
        coming[index] = True
        if (piece := holding.arrived(index, checksum)) is not None:
            checks.create_task(holding.check_piece(piece))

    pulls = None if pull is None else Pulls(link, holding, pull, tasks=checks, arrived=arrived)
    coming = holding.here if pulls is None else pulls.coming
    while not coming.all():
        match await link.receive():
            case Chunk() as chunk if not 0 <= chunk.index < len(holding.chunks) or coming[chunk.index]:
                raise _astray(link, chunk)
            case Chunk(encoding=encoding) as chunk if pulls is not None and encoding == NIXL:
                if chunk.num_bytes != holding.chunks[chunk.index].size:
                    raise _astray(link, chunk)
                pulls.begin(chunk)
                arrived_s = now()
            case Chunk() as chunk:
                arrived(chunk.index, await _receive_chunk(link, holding, base, chunk))
                arrived_s = now()
            case Waiting():
                if now() - arrived_s > deadlines.wait_s:
                    raise WeightsError(
                        f"the relay at {link.peer} itself waits, for more than {deadlines.wait_s:g} s"
                    )
            case Unknown(reason):
                raise UnknownVersionError(f"the relay at {link.peer} says: {reason}")
            case other:
                raise _astray(link, other)
    if pulls is not None:
        await pulls.end(deadlines.heartbeat_s)


async def _receive_chunk(link: Link, holding: Holding, base: Holding | None, chunk: Chunk) -> int | None:
    """Its bytes, straight into their place where they lie together there and are no delta. Returns its seal,
    which fits; None: that is of the delta."""
    place = holding.chunks[chunk.index]
    raw = chunk.encoding == RAW and chunk.num_bytes == place.size
    delta = chunk.encoding == DELTA and HEAD.size <= chunk.num_bytes <= place.size + HEAD.size
    if not raw and (base is None or not delta):
        raise _astray(link, chunk)
    holding.hold()
    straight = place.flags.c_contiguous and not holding.writers
    target = place if straight else np.empty(place.shape, np.uint8)
    arrived = target if raw else np.empty(chunk.num_bytes, np.uint8)
    await link.receive_into(as_bytes(arrived))
    holding.received_bytes += chunk.num_bytes
    match await link.receive():
        case ChunkChecksum(None):
            raise TornVersionError(f"the relay at {link.peer} has overwritten version {holding.version}")
        case ChunkChecksum(digest) if digest == xxhash.xxh3_64_intdigest(as_bytes(arrived)):
            holding.encodings[RAW if raw else kind_of(arrived)] += 1
            holding.decoded_bytes += place.size
            if not raw and base is not None:
                apply(arrived, np.ascontiguousarray(base.chunks[chunk.index]), target)
            if target is not place:
                holding.hold()
                place[...] = target
            return digest if raw else None
        case ChunkChecksum():
            raise DigestMismatchError(
                f"{holding.chunk_name(chunk.index)} of version {holding.version} was changed on its way from "
                f"{link.peer}"
            )
        case other:
            raise _astray(link, other)


def _astray(link: Link, message: object) -> WeightsError:
    return WeightsError(f"the relay at {link.peer} does not keep the protocol: it says {str(message)[:200]}")


def _verdict(ask: VersionRequest, failures: Sequence[WeightsError]) -> WeightsError:
    """One error for all sources. What was found wrong outweighs what is absent, and that what is silent."""
    told = "; ".join(str(failure) for failure in failures) or "no source was named"
    text = f"weights version {ask.version} cannot be fetched: {told}"
    if any(isinstance(failure, DigestMismatchError) for failure in failures):
        return DigestMismatchError(text)
    if any(isinstance(failure, UnknownVersionError | TornVersionError) for failure in failures):
        return UnknownVersionError(text)
    return WeightsError(f"{text}. No source answers: are these hosts up, and reached from here?")
