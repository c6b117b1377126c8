"""Whole versions of weights in a ring of preallocated slots: writing and reading. See `layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import chain

import msgspec
import numpy as np
from msgspec.structs import replace

from millrace.core.digest import (
    BlockDigest,
    Filling,
    NamedBlock,
    NamedBuffer,
    TensorSpec,
    digest_blocks,
    published_digest,
)
from millrace.core.errors import TornVersionError, WeightsError
from millrace.core.progress import count
from millrace.core.types import Endpoint
from millrace.devices.large_memory import each
from millrace.weights.layout import Bytes, Memory, attach, check_room, drop_above, fill_in, take_slot
from millrace.weights.manifest import (
    bytes_of,
    check_sequence,
    compare,
    exact,
    make_manifest,
    placed,
    read_manifest,
)
from millrace.weights.store.restoring import delta_versions, rebuilt

Copy = Callable[[Sequence[NamedBuffer], Sequence[NamedBuffer]], None]


def _copy(tensors: Sequence[NamedBuffer], into: Sequence[NamedBuffer]) -> None:
    def copy(pair: tuple[NamedBuffer, NamedBuffer]) -> None:
        source, target = pair
        np.copyto(bytes_of(target), source.data)
        count(len(source.data))

    each(copy, zip(tensors, into, strict=True))


def open_writer(endpoint: Endpoint) -> RingWriter:
    """The writer of `endpoint` (a core.protocols.WeightsWriter). Raises WeightsError."""
    return RingWriter(attach(endpoint, writable=True))


def open_reader(endpoint: Endpoint) -> RingReader:
    """A reader of `endpoint` (a core.protocols.WeightsReader). Raises WeightsError."""
    return RingReader(attach(endpoint, writable=False), endpoint)


class RingWriter:
    """Writes versions of one trainer at a time. A respawned trainer opens the ring anew.

    Each process of a trainer has a writer. One process begins, all processes fill, and the process that began
    ends. The sequence is odd until then. If a process dies, the slot stays unreadable until a later `begin`
    takes the slot and changes its sequence. Then `fill` and `end` refuse the earlier trainer's processes.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        memory.touch()

    def write(self, version: int, tensors: Sequence[NamedBuffer]) -> str:
        """Copy `tensors` into a slot; nobody can read it until the relay has staged it.

        Returns:
            The version digest of `tensors` here, not of the copy. The relay compares the copy with the
            digest.
        Raises:
            WeightsError: the version does not fit, or a buffer is not contiguous bytes.
        """
        manifest = make_manifest(tensors)
        filling = self.begin(version, manifest)
        self.fill(filling, manifest, tensors)
        return self.end(filling, manifest, digest_blocks(tensors))

    def begin(self, version: int, manifest: Sequence[TensorSpec]) -> Filling:
        """Take a slot, as `slots` chooses, for the tensors of `manifest`. Drop the versions above `version`.

        Raises: WeightsError: no room.
        """
        encoded = msgspec.msgpack.encode(manifest)
        check_room(self._memory, version, sum(spec.num_bytes for spec in manifest), len(encoded))
        drop_above(self._memory, version)
        return Filling(version, *take_slot(self._memory, version))

    def fill(self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]) -> None:
        """Copy this process's blocks to their places. At least two threads share the blocks, because training
        waits for the copy.

        Raises: WeightsError: not bytes. TornVersionError: another writer has taken the slot.
        """

        def copy(pair: tuple[NamedBuffer, Bytes]) -> None:
            block, place = pair
            self._check(filling)
            np.copyto(place, bytes_of(block).reshape(place.shape))
            count(place.size)

        each(copy, zip(blocks, self.places(filling, manifest, blocks), strict=True), threads_min=2)
        self._check(filling)

    def end(
        self,
        filling: Filling,
        manifest: Sequence[TensorSpec],
        written: Iterable[NamedBlock],
        elsewhere: Iterable[NamedBlock] = (),
    ) -> str:
        """Complete the version. `written`: blocks of all processes that fill this slot. `elsewhere`: blocks
        of processes on other hosts, which fill slots of their own hosts. The relay fetches these blocks.

        Returns: the version digest of all blocks.
        Raises: WeightsError: the blocks are not exactly the tensors of `manifest`. TornVersionError: as
        `fill`.
        """
        blocks = dict[str, list[BlockDigest]]()
        for name, block in chain(written, ((n, replace(b, absent=True)) for n, b in elsewhere)):
            blocks.setdefault(name, []).append(block)
        specs = [replace(spec, blocks=tuple(blocks.get(spec.name, ()))) for spec in manifest]
        if faults := [f"`{spec.name}` {list(spec.shape)}" for spec in specs if not exact(spec)]:
            raise WeightsError(
                f"version {filling.version} is not whole: what its processes wrote is not exactly "
                f"{', '.join(faults[:4])} ({len(faults)} of {len(specs)} tensors). Each value must "
                "be in a block of one rank"
            )
        encoded = msgspec.msgpack.encode(specs)
        check_room(self._memory, filling.version, 0, len(encoded))
        self._check(filling)
        fill_in(self._memory, filling.slot, filling.version, encoded)
        return published_digest(specs)

    def pin(self, register: Callable[[Bytes], Callable[[], None]], areas: Sequence[Bytes] = ()) -> None:
        """Let a GPU copy into the slots, or into `areas` of them. See `Memory.pin`."""
        self._memory.register_areas(register, areas)

    def places(
        self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]
    ) -> list[Bytes]:
        """In place of `fill`, for a caller that copies: the place of each block's bytes in the slot.

        The place of a block of whole rows is contiguous. Raises: TornVersionError: as `fill`.
        """
        specs, data = {spec.name: spec for spec in manifest}, self._memory.data[filling.slot]
        self._check(filling)
        return [
            placed(data, specs[block.name], block.start or (0,) * len(block.shape), block.shape)
            for block in blocks
        ]

    def close(self) -> None:
        """Let go of the mapping. Idempotent."""
        self._memory.close()

    def _check(self, filling: Filling) -> None:
        """Raise TornVersionError: another writer took the slot of this filling."""
        now = self._memory.sequence(filling.slot)
        if now != filling.sequence:
            raise TornVersionError(
                f"slot {filling.slot} was taken while version {filling.version} was written into it: its "
                f"sequence was {filling.sequence} and is {now}. Another trainer publishes into this ring"
            )


class RingReader:
    """Reads staged versions, at any time, from any process, without locks. Pickle makes it a
    `LaterReader`."""

    def __init__(self, memory: Memory, endpoint: Endpoint) -> None:
        self._memory, self._endpoint = memory, endpoint

    def __reduce__(self) -> tuple[type[LaterReader], tuple[Endpoint]]:
        return LaterReader, (self._endpoint,)

    def versions(self) -> list[int]:
        """Complete versions, oldest first: in slots, and as deltas."""
        return sorted({*self._memory.versions(), *delta_versions(self._memory, self._endpoint.path)})

    def pin(self, register: Callable[[Bytes], Callable[[], None]]) -> None:
        """Let a GPU copy from the slots. See `Memory.pin`."""
        self._memory.register_areas(register)

    def read(self, version: int, into: Sequence[NamedBuffer], copy: Copy | None = None) -> str:
        """Copy every tensor of `version` into the writable buffers of `into`, in the manifest's order.

        After an error nothing may be computed from the buffers. The copy releases the GIL, so one thread can
        pull while another thread decodes. `copy`: a function for buffers that are not in this memory. It gets
        the tensors in the slot and `into`, and returns when all are copied.

        Returns:
            The digest under which the version was staged. The caller compares a digest of the buffers with
            it.
        Raises:
            UnknownVersionError: the relay does not have the version. Ask again for the newest.
            TornVersionError: overwritten during the copy. Ask again for the newest.
            WeightsError: tensors are missing, unexpected, or of another dtype, shape or order.
        """
        with self.view(version) as (digest, tensors):
            compare(version, tensors, into)
            (copy or _copy)(tensors, into)
        return digest

    @contextmanager
    def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
        """The digest under which `version` was staged, and its tensors in the slot, read-only. A version that
        the relay keeps as a delta is rebuilt in memory of this process, until exit.

        Raises: UnknownVersionError. At exit TornVersionError, in place of any error inside: the tensors were
        overwritten during the view, so results from the tensors mean nothing.
        """
        memory, place = self._memory, self._memory.find(version)
        if place is None:
            digest, manifest, data = rebuilt(memory, self._endpoint.path, version)
            yield digest, [_tensor(spec, data) for spec in manifest]
            return
        slot, sequence = place
        digest, data = memory.digest(slot), memory.data[slot]
        manifest = read_manifest(memory, slot, sequence)
        try:
            yield digest, [_tensor(spec, data) for spec in manifest]
        finally:
            check_sequence(memory, slot, sequence)

    def close(self) -> None:
        """Let go of the mapping. Idempotent."""
        self._memory.close()


def _tensor(spec: TensorSpec, data: Bytes) -> NamedBuffer:
    tensor_bytes = data[spec.offset : spec.offset + spec.num_bytes]
    return NamedBuffer(spec.name, spec.dtype, tuple(spec.shape), tensor_bytes)


class LaterReader:
    """A reader for another process. Its first method maps the ring, and raises the error of a dead relay."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @cached_property
    def _reader(self) -> RingReader:
        return open_reader(self._endpoint)

    def pin(self, register: Callable[[Bytes], Callable[[], None]]) -> None:
        self._reader.pin(register)

    def view(self, version: int) -> AbstractContextManager[tuple[str, list[NamedBuffer]]]:
        """As `RingReader.view`."""
        return self._reader.view(version)

    def close(self) -> None:
        self._reader.close()
