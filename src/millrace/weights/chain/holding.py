"""One version in a slot, as chunks: which of them are here, and what they must be together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.core.digest import (
    TensorSpec,
    block_digest,
    kind_of,
    published_digest,
    tensor_digest,
    version_digest,
    version_kind,
)
from millrace.core.errors import DigestMismatchError, TornVersionError
from millrace.core.pulse import Pulse
from millrace.weights.delta.coding import WIDTHS
from millrace.weights.layout import Bytes, Memory
from millrace.weights.manifest import check_sequence, in_order, placed, read_manifest
from millrace.weights.slots import check_room, complete_manifest, confirm, fill_in, take_slot

CHUNKS = 256
CHUNK_STEP_BYTES, CHUNK_BYTES_MAX = 64 << 10, 4 << 20


class SlotTaken(TornVersionError):
    """The slot of what arrives is another version's now: no other source can help."""


class Holding:
    """A version that is whole here, or is arriving.

    Every relay cuts a manifest into the same chunks, each within one piece and of at most `chunk_bytes`. A
    chunk may be sent on as soon as it is here. The version is readable once every piece's digest is right.

    Attributes:
        version, digest  which one; `digest` as the trainer published it
        manifest         with its tensors and pieces `in_order`
        chunks           where each lies in the slot, of any strides
        here             (chunks,) bool: it is here
        ended            why no more will arrive for now; empty: it may
        news             fires when a chunk has arrived, or no more will
        seals            of chunks, once they are known: XXH3-64 of their bytes
        received_bytes   of it, from other relays, as they were sent
        decoded_bytes    the same, as they are here
        encodings        chunks received of each kind: raw, nixl, or a delta's kind
    """

    def __init__(
        self, memory: Memory, place: tuple[int, int], version: int, manifest: Sequence[TensorSpec]
    ) -> None:
        self.memory, (self.slot, self.sequence) = memory, place
        self.version, self.digest, self.manifest = version, published_digest(manifest), list(manifest)
        self.chunks: list[Bytes] = []
        self.checksums: dict[int, int] = {}
        self.ended, self.received_bytes, self.decoded_bytes = "", 0, 0
        self.encodings = Counter[str]()
        self._pieces = [(tensor, piece) for tensor, spec in enumerate(manifest) for piece in spec.pieces]
        self._spans = list[slice]()  # of chunks, for each piece
        most = chunk_bytes(manifest)
        for piece in range(len(self._pieces)):
            first = len(self.chunks)
            self.chunks += cut(self._place(piece), most)
            self._spans.append(slice(first, len(self.chunks)))
        self._piece_of = [index for index, span in enumerate(self._spans) for _ in self.chunks[span]]
        self._right = [False] * len(self._pieces)
        self._kind = version_kind(manifest)
        # Digests of those that are whole and right: at first of those without a value.
        self._tensors = [tensor_digest(b"", self._kind)] * len(manifest)
        self.here: NDArray[np.bool_] = np.zeros(len(self.chunks), bool)
        self.news = Pulse()

    @property
    def writers(self) -> bool:
        """Whether processes of the trainer wrote what is here, and may take the slot again at any time."""
        return self.sequence % 2 == 0

    @property
    def intact(self) -> bool:
        """Whether the slot still holds this."""
        return self.memory.sequence(self.slot) == self.sequence

    def check(self) -> None:
        """Raise TornVersionError unless `intact`."""
        check_sequence(self.memory, self.slot, self.sequence)

    def hold(self) -> None:
        """Before bytes are written into the slot. Raises SlotTaken unless `intact`."""
        if not self.intact:
            raise SlotTaken(f"the slot of version {self.version} was taken while it arrived")

    def mark_here(self, absent: Collection[tuple[str, tuple[int, ...]]]) -> None:
        """All pieces but these (tensor, start)."""
        for (tensor, piece), span in zip(self._pieces, self._spans, strict=True):
            self.here[span] = (self.manifest[tensor].name, piece.start) not in absent

    def arrived(self, index: int, checksum: int | None) -> int | None:
        """This chunk is here. Returns its piece, if that is whole with it."""
        self.here[index] = True
        if checksum is not None:
            self.checksums[index] = checksum
        self.news.fire()
        piece = self._piece_of[index]
        return piece if self.here[self._spans[piece]].all() else None

    def unchecked(self) -> list[int]:
        """Pieces that are whole, and were not checked yet."""
        return [
            piece
            for piece, span in enumerate(self._spans)
            if not self._right[piece] and self.here[span].all()
        ]

    async def check_piece(self, piece: int) -> None:
        """Digest a piece that is whole. Raises DigestMismatchError: its chunks are to be asked for again."""
        tensor, published = self._pieces[piece]
        kind = kind_of(published.digest)
        found = await asyncio.to_thread(block_digest, self._place(piece), kind)
        if found != published.digest:
            self.check()  # or ranks here have begun to write another version into the slot
            self.here[self._spans[piece]] = False
            raise DigestMismatchError(
                f"{self._name(piece)} of version {self.version} has digest {found} here, and the trainer's "
                f"has {published.digest}"
            )
        self._right[piece] = True
        spec = self.manifest[tensor]
        if len(spec.pieces) == 1 and kind == self._kind:
            self._tensors[tensor] = found
        elif all(right for right, (of, _) in zip(self._right, self._pieces, strict=True) if of == tensor):
            data = self.memory.data[self.slot][spec.offset : spec.offset + spec.num_bytes]
            self._tensors[tensor] = await asyncio.to_thread(tensor_digest, data, self._kind)

    def finish(self) -> str:
        """Every piece is right: make the version readable. Returns its digest, of whole tensors."""
        if self.memory.complete(self.slot) and self.intact:
            return self.memory.digest(self.slot)  # staged meanwhile
        assert all(self._right), self.version
        digests = zip(self.manifest, self._tensors, strict=True)
        entries = ((spec.name, spec.dtype, spec.shape, digest) for spec, digest in digests)
        whole = version_digest(entries, self._kind)
        encoded = msgspec.msgpack.encode(self.manifest)
        self.check()
        if self.writers:
            complete_manifest(self.memory, self.slot, encoded)
        else:
            fill_in(self.memory, self.slot, self.version, encoded)
            self.sequence += 1
        confirm(self.memory, self.slot, self.sequence, whole)
        return whole

    def as_laid_out(self, other: Holding) -> bool:
        """Whether the other's chunks are the same parts of the same tensors."""
        return _layout(self.manifest) == _layout(other.manifest)

    def width(self, index: int) -> int:
        """Bytes of an element of this chunk's tensor; 1 where that is not known."""
        tensor, _ = self._pieces[self._piece_of[index]]
        return WIDTHS.get(self.manifest[tensor].dtype, 1)

    def chunk_name(self, index: int) -> str:
        """For people."""
        piece = self._piece_of[index]
        return f"chunk {index - self._spans[piece].start} of {self._name(piece)}"

    def end(self, why: str) -> None:
        """No more will arrive for now: who waits for more is told."""
        self.ended = why
        self.news.fire()

    def _place(self, piece: int) -> Bytes:
        tensor, block = self._pieces[piece]
        return placed(self.memory.data[self.slot], self.manifest[tensor], block.start, block.shape)

    def _name(self, piece: int) -> str:
        tensor, block = self._pieces[piece]
        spec = self.manifest[tensor]
        return f"`{spec.name}`" + ("" if block.shape == spec.shape else f" from {list(block.start)}")


def _layout(manifest: Sequence[TensorSpec]) -> list[tuple[object, ...]]:
    return [
        (spec.name, spec.dtype, spec.shape, [(piece.start, piece.shape) for piece in spec.pieces])
        for spec in manifest
    ]


def written(memory: Memory, slot: int, sequence: int) -> Holding:
    """What processes of the trainer, or this relay, wrote into a slot: all of it, or the pieces of this host.

    Raises: TornVersionError, WeightsError (its manifest is damaged).
    """
    manifest = read_manifest(memory, slot, sequence)
    absent = {(spec.name, piece.start) for spec in manifest for piece in spec.pieces if piece.absent}
    holding = Holding(memory, (slot, sequence), memory.version(slot), in_order(manifest))
    holding.mark_here(absent)
    return holding


def arriving(memory: Memory, version: int, manifest: Sequence[TensorSpec]) -> Holding:
    """A slot for a version of which nothing is here yet. Raises WeightsError: no room."""
    encoded = msgspec.msgpack.encode(manifest)
    check_room(memory, version, sum(spec.num_bytes for spec in manifest), len(encoded))
    return Holding(memory, take_slot(memory, version), version, manifest)


def chunk_bytes(manifest: Sequence[TensorSpec]) -> int:
    """What a chunk has at most. One more relay in a chain costs the time of one chunk: with 256 of them, less
    than 1/256 of a broadcast. Large versions have more, of 4 MiB."""
    share = sum(spec.num_bytes for spec in manifest) // CHUNKS
    return min(CHUNK_BYTES_MAX, (share // CHUNK_STEP_BYTES + 1) * CHUNK_STEP_BYTES)


def cut(view: Bytes, most: int) -> Iterator[Bytes]:
    """A block of a tensor as parts of at most so many bytes: runs of its bytes where these lie together, else
    groups of its rows."""
    if not view.size:
        return
    if view.flags.c_contiguous:
        flat = view.reshape(-1)
        yield from (flat[start : start + most] for start in range(0, len(flat), most))
    elif view.size <= most:
        yield view
    else:
        rows = max(1, most * len(view) // view.size)
        for start in range(0, len(view), rows):
            yield from cut(view[start] if rows == 1 else view[start : start + rows], most)
