"""Whole versions of weights in a ring of preallocated slots: writing and reading. See `layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain

import msgspec
import numpy as np
from msgspec.structs import replace

from millrace.core.digest import (
    BlockDigest,
    Filling,
    NamedBuffer,
    NamedPiece,
    TensorSpec,
    digest_blocks,
    published_digest,
)
from millrace.core.errors import TornVersionError, WeightsError
from millrace.core.types import Endpoint
from millrace.weights.layout import Bytes, Memory, attach
from millrace.weights.manifest import (
    bytes_of,
    check_sequence,
    compare,
    exact,
    make_manifest,
    placed,
    read_manifest,
)
from millrace.weights.slots import check_room, drop_above, fill_in, take_slot
from millrace.weights.store.rebuilding import kept, rebuilt

Copy = Callable[[Sequence[NamedBuffer], Sequence[NamedBuffer]], None]


def _copy(held: Sequence[NamedBuffer], into: Sequence[NamedBuffer]) -> None:
    for source, target in zip(held, into, strict=True):
        np.copyto(bytes_of(target), source.data)


def open_writer(endpoint: Endpoint) -> RingWriter:
    """The writer of `endpoint` (a core.protocols.WeightsWriter). Raises WeightsError."""
    return RingWriter(attach(endpoint, writable=True))


def open_reader(endpoint: Endpoint) -> RingReader:
    """A reader of `endpoint` (a core.protocols.WeightsReader). Raises WeightsError."""
    return RingReader(attach(endpoint, writable=False), endpoint)


class RingWriter:
    """Writes versions. One trainer at a time: one that is respawned opens the ring anew.

    A trainer of several processes has a writer in each. One begins, all fill, and the same one ends when all
    have answered. Until then the sequence is odd. Where one dies, the slot stays unreadable until a later
    `begin` takes it and makes the sequence another. With that `fill` and `end` refuse who is left of the
    earlier processes.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="publish")
        memory.touch()

    def write(self, version: int, tensors: Sequence[NamedBuffer]) -> str:
        """Copy `tensors` into a slot; nobody can read it until the relay has staged it.

        Returns:
            The version digest of `tensors` as they are here, not of the copy: what is staged is held to it.
        Raises:
            WeightsError: the version does not fit, or a buffer is not contiguous bytes.
        """
        manifest = make_manifest(tensors)
        filling = self.begin(version, manifest)
        self.fill(filling, manifest, tensors)
        return self.end(filling, manifest, digest_blocks(tensors))

    def begin(self, version: int, manifest: Sequence[TensorSpec]) -> Filling:
        """Take a slot, as `slots` says, for the tensors of `manifest`. Versions above are dropped.

        Raises: WeightsError: no room.
        """
        encoded = msgspec.msgpack.encode(manifest)
        check_room(self._memory, version, sum(spec.num_bytes for spec in manifest), len(encoded))
        drop_above(self._memory, version)
        return Filling(version, *take_slot(self._memory, version))

    def fill(self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]) -> None:
        """Copy this process's blocks to their places. Two threads share them: both let go of the GIL.

        Raises: WeightsError: not bytes. TornVersionError: another writer has taken the slot.
        """
        specs, data = {spec.name: spec for spec in manifest}, self._memory.data[filling.slot]
        left = iter(blocks)

        def work() -> None:
            for block in left:
                self._hold(filling)
                start = block.start or (0,) * len(block.shape)
                place = placed(data, specs[block.name], start, block.shape)
                np.copyto(place, bytes_of(block).reshape(place.shape))

        other = self._helper.submit(work)
        try:
            work()
        finally:
            other.result()
        self._hold(filling)

    def end(
        self,
        filling: Filling,
        manifest: Sequence[TensorSpec],
        written: Iterable[NamedPiece],
        elsewhere: Iterable[NamedPiece] = (),
    ) -> str:
        """The version is whole: `written` are the pieces of all processes that fill this slot, `elsewhere`
        those of processes on other hosts, which fill the slots of their own. The relay gets these from there.

        Returns: the version digest of all pieces.
        Raises: WeightsError: they are not exactly the tensors of `manifest`. TornVersionError: as `fill`.
        """
        pieces = dict[str, list[BlockDigest]]()
        for name, piece in chain(written, ((n, replace(p, absent=True)) for n, p in elsewhere)):
            pieces.setdefault(name, []).append(piece)
        whole = [replace(spec, pieces=tuple(pieces.get(spec.name, ()))) for spec in manifest]
        if faults := [f"`{spec.name}` {list(spec.shape)}" for spec in whole if not exact(spec)]:
            raise WeightsError(
                f"version {filling.version} is not whole: what its processes wrote is not exactly "
                f"{', '.join(faults[:4])} ({len(faults)} of {len(whole)} tensors). Each value must "
                "be in a part of one rank"
            )
        encoded = msgspec.msgpack.encode(whole)
        check_room(self._memory, filling.version, 0, len(encoded))
        self._hold(filling)
        fill_in(self._memory, filling.slot, filling.version, encoded)
        return published_digest(whole)

    def pin(self, register: Callable[[Bytes], Callable[[], None]]) -> None:
        """So that a GPU copies into the slots by itself. See `Memory.pin`."""
        self._memory.pin(register)

    def places(
        self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]
    ) -> list[Bytes]:
        """In place of `fill`, for who copies by itself: where in the slot each block's bytes go.

        A block of whole rows has a place in one piece. Raises: TornVersionError: as `fill`.
        """
        specs, data = {spec.name: spec for spec in manifest}, self._memory.data[filling.slot]
        self._hold(filling)
        return [
            placed(data, specs[block.name], block.start or (0,) * len(block.shape), block.shape)
            for block in blocks
        ]

    def close(self) -> None:
        """Let go of the mapping. Idempotent."""
        self._helper.shutdown()
        self._memory.close()

    def _hold(self, filling: Filling) -> None:
        """Raise TornVersionError unless the slot is still this filling's."""
        now = self._memory.sequence(filling.slot)
        if now != filling.sequence:
            raise TornVersionError(
                f"slot {filling.slot} was taken while version {filling.version} was written into it: its "
                f"sequence was {filling.sequence} and is {now}. Another trainer publishes into this ring"
            )


class RingReader:
    """Reads staged versions, at any time, from any process, without locks. Pickled, it is a `LaterReader`."""

    def __init__(self, memory: Memory, endpoint: Endpoint) -> None:
        self._memory, self._endpoint = memory, endpoint

    def __reduce__(self) -> tuple[type[LaterReader], tuple[Endpoint]]:
        return LaterReader, (self._endpoint,)

    def held(self) -> list[int]:
        """Complete versions, oldest first: in slots, and as deltas."""
        return sorted({*self._memory.held(), *kept(self._memory, self._endpoint.path)})

    def pin(self, register: Callable[[Bytes], Callable[[], None]]) -> None:
        """So that a GPU copies from the slots by itself. See `Memory.pin`."""
        self._memory.pin(register)

    def read(self, version: int, into: Sequence[NamedBuffer], copy: Copy | None = None) -> str:
        """Copy every tensor of `version` into the writable buffers of `into`, in the manifest's order.

        After an error the buffers hold anything: nothing may be computed from them. The copy lets go of
        the GIL, so a thread can pull while another decodes. `copy`: for buffers that are not in this memory.
        It gets the tensors in the slot and `into`, and has copied all when it returns.

        Returns:
            The digest under which it was staged; compare it with one taken of the buffers.
        Raises:
            UnknownVersionError: not held.
            TornVersionError: overwritten meanwhile. Both: ask again for the newest.
            WeightsError: tensors are missing, left over, or of another dtype, shape or order.
        """
        with self.view(version) as (digest, held):
            compare(version, held, into)
            (copy or _copy)(held, into)
        return digest

    @contextmanager
    def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
        """The digest under which `version` was staged, and its tensors, read-only, where they lie. One that
        the relay keeps as a delta is rebuilt in memory of this process for as long.

        Raises: UnknownVersionError. At exit TornVersionError, whatever happened inside: the tensors were
        overwritten meanwhile, and what was made of them means nothing.
        """
        memory, place = self._memory, self._memory.find(version)
        if place is None:
            digest, manifest, data = rebuilt(memory, self._endpoint.path, version)
            yield digest, [_part(spec, data) for spec in manifest]
            return
        slot, sequence = place
        digest, data = memory.digest(slot), memory.data[slot]
        manifest = read_manifest(memory, slot, sequence)
        try:
            yield digest, [_part(spec, data) for spec in manifest]
        finally:
            check_sequence(memory, slot, sequence)

    def close(self) -> None:
        """Let go of the mapping. Idempotent."""
        self._memory.close()


def _part(spec: TensorSpec, data: Bytes) -> NamedBuffer:
    part = data[spec.offset : spec.offset + spec.num_bytes]
    return NamedBuffer(spec.name, spec.dtype, tuple(spec.shape), part)


class LaterReader:
    """A reader in another process. It maps the ring when a view is asked for, so a relay that is gone is an
    error of the view."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @contextmanager
    def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
        """As `RingReader.view`."""
        with open_reader(self._endpoint).view(version) as held:
            yield held
