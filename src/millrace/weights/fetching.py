"""How a relay gets a version from others: from one after the other, what it still lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

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
from millrace.weights.delta import apply, kind_of
from millrace.weights.holding import Holding
from millrace.weights.manifest import decode_manifest, in_order
from millrace.weights.packed import HEAD, RAW
from millrace.weights.sending import DELTA
from millrace.weights.wire import (
    Ask,
    Chunk,
    Deadlines,
    Found,
    Link,
    Seal,
    Unknown,
    Waiting,
    Want,
    as_bytes,
    connected,
)


class Order(msgspec.Struct, frozen=True):
    """One version to get. `begin` gives it a place, or the one where some of it is already. `base`: what is
    here of the version that its deltas are made against; None: nothing that they fit."""

    ask: Ask
    slot_bytes: int
    begin: Callable[[list[TensorSpec]], Holding]
    base: Callable[[tuple[int, str], Holding], Holding | None]
    secret: str
    deadlines: Deadlines


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
        except _SlotTaken:
            raise
        except WeightsError as error:
            failures.append(error)
    raise _verdict(order.ask, failures)


class _SlotTaken(TornVersionError):
    """No other source can help."""


async def _fetch_from(address: str, order: Order) -> Holding:
    async with connected(address, order.secret, order.deadlines) as link:
        await link.send(order.ask)
        manifest, told = await _found(link, order)
        holding = order.begin(manifest)
        base = told and order.base(told, holding)
        await link.send(Want(np.packbits(~holding.here).tobytes(), deltas=base is not None))
        try:
            async with asyncio.TaskGroup() as checks:
                for piece in holding.unchecked():
                    checks.create_task(holding.check_piece(piece))
                await _receive_chunks(link, (holding, base), order.deadlines.wait_s, checks)
        except BaseExceptionGroup as group:
            raise next(leaves(group)) from None
        return holding


async def _found(link: Link, order: Order) -> tuple[list[TensorSpec], tuple[int, str] | None]:
    """The manifest, and the base that is offered. It has the digests of all that will arrive, so it must be
    the trainer's."""
    match await link.receive():
        case Found(encoded, base):
            manifest = in_order(decode_manifest(encoded, order.slot_bytes, f"of the relay at {link.peer}"))
            if (found := published_digest(manifest)) != order.ask.digest:
                raise DigestMismatchError(
                    f"the manifest of version {order.ask.version} from {link.peer} has digest {found}, and "
                    f"the trainer's has {order.ask.digest}"
                )
            return manifest, base
        case Unknown(reason):
            raise UnknownVersionError(f"the relay at {link.peer} says: {reason}")
        case other:
            raise _astray(link, other)


async def _receive_chunks(
    link: Link, places: tuple[Holding, Holding | None], wait_s: float, checks: asyncio.TaskGroup
) -> None:
    """Until every chunk is here. A piece that is whole is checked while the next ones arrive. `places`: of
    what arrives, and of what its deltas are made against."""
    holding, base = places
    now = asyncio.get_running_loop().time
    arrived_s = now()
    while not holding.here.all():
        match await link.receive():
            case Chunk() as chunk:
                seal = await _receive_chunk(link, holding, base, chunk)
                arrived_s = now()
                if (piece := holding.arrived(chunk.index, seal)) is not None:
                    checks.create_task(holding.check_piece(piece))
            case Waiting():
                if now() - arrived_s > wait_s:
                    raise WeightsError(f"the relay at {link.peer} itself waits, for more than {wait_s:g} s")
            case Unknown(reason):
                raise UnknownVersionError(f"the relay at {link.peer} says: {reason}")
            case other:
                raise _astray(link, other)


async def _receive_chunk(link: Link, holding: Holding, base: Holding | None, chunk: Chunk) -> int | None:
    """Its bytes, straight into their place where they lie together there and are no delta. Returns its seal,
    which fits; None: that is of the delta."""
    if not 0 <= chunk.index < len(holding.chunks) or holding.here[chunk.index]:
        raise _astray(link, chunk)
    place = holding.chunks[chunk.index]
    raw = chunk.encoding == RAW and chunk.num_bytes == place.size
    delta = chunk.encoding == DELTA and HEAD.size <= chunk.num_bytes <= place.size + HEAD.size
    if not raw and (base is None or not delta):
        raise _astray(link, chunk)
    _hold(holding)
    straight = place.flags.c_contiguous and not holding.writers
    target = place if straight else np.empty(place.shape, np.uint8)
    arrived = target if raw else np.empty(chunk.num_bytes, np.uint8)
    await link.receive_into(as_bytes(arrived))
    holding.received_bytes += chunk.num_bytes
    match await link.receive():
        case Seal(None):
            raise TornVersionError(f"the relay at {link.peer} has overwritten version {holding.version}")
        case Seal(digest) if digest == xxhash.xxh3_64_intdigest(as_bytes(arrived)):
            holding.encodings[RAW if raw else kind_of(arrived)] += 1
            holding.decoded_bytes += place.size
            if not raw and base is not None:
                apply(arrived, np.ascontiguousarray(base.chunks[chunk.index]), target)
            if target is not place:
                _hold(holding)
                place[...] = target
            return digest if raw else None
        case Seal():
            raise DigestMismatchError(
                f"{holding.chunk_name(chunk.index)} of version {holding.version} was changed on its way from "
                f"{link.peer}"
            )
        case other:
            raise _astray(link, other)


def _hold(holding: Holding) -> None:
    if not holding.intact:
        raise _SlotTaken(f"the slot of version {holding.version} was taken while it arrived")


def _astray(link: Link, message: object) -> WeightsError:
    return WeightsError(f"the relay at {link.peer} does not keep the protocol: it says {str(message)[:200]}")


def _verdict(ask: Ask, failures: Sequence[WeightsError]) -> WeightsError:
    """One error for all sources. What was found wrong outweighs what is absent, and that what is silent."""
    told = "; ".join(str(failure) for failure in failures) or "no source was named"
    text = f"weights version {ask.version} cannot be fetched: {told}"
    if any(isinstance(failure, DigestMismatchError) for failure in failures):
        return DigestMismatchError(text)
    if any(isinstance(failure, UnknownVersionError | TornVersionError) for failure in failures):
        return UnknownVersionError(text)
    return WeightsError(f"{text}. No source answers: are these hosts up, and reached from here?")
