"""One version in a slot, as chunks: the chunks that are here, and the digests that the blocks must have."""

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
from millrace.core.progress import count
from millrace.core.pulse import Pulse
from millrace.weights.delta_coding import WIDTHS
from millrace.weights.layout import Bytes, Memory, check_room, complete_manifest, confirm, fill_in, take_slot
from millrace.weights.manifest import check_sequence, in_order, placed, read_manifest

CHUNKS = 256
CHUNK_STEP_BYTES, CHUNK_BYTES_MAX = 64 << 10, 4 << 20


class SlotTaken(TornVersionError):
    """Another version took the slot of the version that arrives: no other source can help."""


class ChunkedVersion:
    """A version in a slot, complete or arriving.

    Every relay cuts a manifest into the same chunks, each within one block and of at most `chunk_bytes`. A
    relay may send a chunk as soon as the chunk is here. The version is readable once every block's digest is
    right.

    Attributes:
        version, digest  `digest` as the trainer published it
        manifest         with its tensors and blocks `in_order`
        chunks           a view of each chunk in the slot, of any strides
        here             (chunks,) bool: the chunk is here
        ended            why no more chunks will arrive for now; empty: more may arrive
        news             fires when a chunk has arrived, or `ended` is set
        checksums        by chunk, once known: XXH3-64 of its bytes
        received_bytes   from other relays, as sent
        decoded_bytes    from other relays, as they are in the slot
        encodings        number of chunks received of each kind: raw, nixl, or a delta's kind
    """

    def __init__(
        self, memory: Memory, place: tuple[int, int], version: int, manifest: Sequence[TensorSpec]
    ) -> None:
        self.memory, (self.slot, self.sequence) = memory, place
        self.version, self.digest, self.manifest = version, published_digest(manifest), list(manifest)
        self.chunks: list[Bytes] = []
        self.checksums: dict[int, int] = {}
        self.ended, self.received_bytes, self.decoded_bytes = "", 0, 0
        self._arriving_bytes = self._upstream_bytes = 0
        self.encodings = Counter[str]()
        self._blocks = [(tensor, block) for tensor, spec in enumerate(manifest) for block in spec.blocks]
        self._chunks_of = list[slice]()  # for each block
        most = chunk_bytes(manifest)
        for block in range(len(self._blocks)):
            first = len(self.chunks)
            self.chunks += cut(self._place(block), most)
            self._chunks_of.append(slice(first, len(self.chunks)))
        self._block_of = [block for block, chunks in enumerate(self._chunks_of) for _ in self.chunks[chunks]]
        self._checked = [False] * len(self._blocks)
        self._kind = version_kind(manifest)
        # Digests of tensors that are complete and right. A tensor without a value is right from the start.
        self._tensors = [tensor_digest(b"", self._kind)] * len(manifest)
        self.here: NDArray[np.bool_] = np.zeros(len(self.chunks), bool)
        self.news = Pulse()

    @property
    def writers(self) -> bool:
        """Whether processes of the trainer wrote the slot. They may take the slot again at any time."""
        return self.sequence % 2 == 0

    @property
    def intact(self) -> bool:
        """Whether the slot still has this version."""
        return self.memory.sequence(self.slot) == self.sequence

    def check(self) -> None:
        """Raise TornVersionError unless `intact`."""
        check_sequence(self.memory, self.slot, self.sequence)

    def check_slot(self) -> None:
        """Called before bytes are written into the slot. Raises SlotTaken unless `intact`."""
        if not self.intact:
            raise SlotTaken(f"the slot of version {self.version} was taken while it arrived")

    def mark_here(self, absent: Collection[tuple[str, tuple[int, ...]]]) -> None:
        """Mark every block here, except the blocks (tensor, start) of `absent`."""
        for (tensor, block), chunks in zip(self._blocks, self._chunks_of, strict=True):
            self.here[chunks] = (self.manifest[tensor].name, block.start) not in absent

    @property
    def reached_bytes(self) -> int:
        """How far the version has come, here or at the relay that this one waits for. The number only grows,
        and in a circle of relays that wait for each other it stops."""
        here = zip(self.chunks, self.here, strict=True)
        own = sum(chunk.size for chunk, is_here in here if is_here) + self._arriving_bytes
        return max(own, self._upstream_bytes)

    def receives(self, num_bytes: int) -> None:
        """So many bytes of the next chunk have arrived."""
        self._arriving_bytes += num_bytes
        count(num_bytes)

    def begin(self) -> None:
        """Another source begins to send chunks."""
        self.ended, self._arriving_bytes, self._upstream_bytes = "", 0, 0

    def goes_on_upstream(self, reached_bytes: int) -> bool:
        """The source waits itself, and says how far the version has come. Returns whether it has come
        further."""
        further = reached_bytes > self._upstream_bytes
        if further:
            self._upstream_bytes = reached_bytes
            count()
        return further

    def arrived(self, index: int, checksum: int | None) -> int | None:
        """Mark a chunk here. Returns the chunk's block, if the block is complete now."""
        self.here[index] = True
        self._arriving_bytes = 0
        count()
        if checksum is not None:
            self.checksums[index] = checksum
        self.news.fire()
        block = self._block_of[index]
        return block if self.here[self._chunks_of[block]].all() else None

    def unchecked(self) -> list[int]:
        """Blocks that are complete, and were not checked yet."""
        return [
            block
            for block, chunks in enumerate(self._chunks_of)
            if not self._checked[block] and self.here[chunks].all()
        ]

    async def check_block(self, block: int) -> None:
        """Digest a complete block. Raises DigestMismatchError: the block's chunks must be fetched again."""
        tensor, published = self._blocks[block]
        kind = kind_of(published.digest)
        digest = await asyncio.to_thread(block_digest, self._place(block), kind)
        if digest != published.digest:
            self.check()  # ranks of this host may have begun to write another version into the slot
            self.here[self._chunks_of[block]] = False
            raise DigestMismatchError(
                f"{self._name(block)} of version {self.version} has digest {digest} here, and the trainer's "
                f"has {published.digest}"
            )
        self._checked[block] = True
        spec = self.manifest[tensor]
        if len(spec.blocks) == 1 and kind == self._kind:
            self._tensors[tensor] = digest
        elif all(
            checked for checked, (of, _) in zip(self._checked, self._blocks, strict=True) if of == tensor
        ):
            data = self.memory.data[self.slot][spec.offset : spec.offset + spec.num_bytes]
            self._tensors[tensor] = await asyncio.to_thread(tensor_digest, data, self._kind)

    def finish(self) -> str:
        """Make the version readable: every block is right. Returns the version's digest, of whole tensors."""
        if self.memory.complete(self.slot) and self.intact:
            return self.memory.digest(self.slot)  # staged during the fetch
        assert all(self._checked), self.version
        digests = zip(self.manifest, self._tensors, strict=True)
        entries = ((spec.name, spec.dtype, spec.shape, digest) for spec, digest in digests)
        digest = version_digest(entries, self._kind)
        encoded = msgspec.msgpack.encode(self.manifest)
        self.check()
        if self.writers:
            complete_manifest(self.memory, self.slot, encoded)
        else:
            fill_in(self.memory, self.slot, self.version, encoded)
            self.sequence += 1
        confirm(self.memory, self.slot, self.sequence, digest)
        return digest

    def same_layout(self, other: ChunkedVersion) -> bool:
        """Whether both versions cut the same tensors into the same chunks."""
        return _layout(self.manifest) == _layout(other.manifest)

    def width(self, index: int) -> int:
        """Bytes of an element of the chunk's tensor; 1 for an unknown dtype."""
        tensor, _ = self._blocks[self._block_of[index]]
        return WIDTHS.get(self.manifest[tensor].dtype, 1)

    def chunk_name(self, index: int) -> str:
        """The chunk's name in messages."""
        block = self._block_of[index]
        return f"chunk {index - self._chunks_of[block].start} of {self._name(block)}"

    def end(self, reason: str) -> None:
        """No more chunks will arrive for now: wake the tasks that wait for chunks."""
        self.ended = reason
        self.news.fire()

    def _place(self, block: int) -> Bytes:
        tensor, digest = self._blocks[block]
        return placed(self.memory.data[self.slot], self.manifest[tensor], digest.start, digest.shape)

    def _name(self, block: int) -> str:
        tensor, digest = self._blocks[block]
        spec = self.manifest[tensor]
        return f"`{spec.name}`" + ("" if digest.shape == spec.shape else f" from {list(digest.start)}")


def _layout(manifest: Sequence[TensorSpec]) -> list[tuple[object, ...]]:
    return [
        (spec.name, spec.dtype, spec.shape, [(block.start, block.shape) for block in spec.blocks])
        for spec in manifest
    ]


def written(memory: Memory, slot: int, sequence: int) -> ChunkedVersion:
    """The version that the trainer's processes, or this relay, wrote into a slot: complete, or the blocks of
    this host.

    Raises: TornVersionError, WeightsError (its manifest is damaged).
    """
    manifest = read_manifest(memory, slot, sequence)
    absent = {(spec.name, block.start) for spec in manifest for block in spec.blocks if block.absent}
    chunked = ChunkedVersion(memory, (slot, sequence), memory.version(slot), in_order(manifest))
    chunked.mark_here(absent)
    return chunked


def arriving(memory: Memory, version: int, manifest: Sequence[TensorSpec]) -> ChunkedVersion:
    """Take a slot for a version that has no chunk here yet. Raises WeightsError: no room."""
    encoded = msgspec.msgpack.encode(manifest)
    check_room(memory, version, sum(spec.num_bytes for spec in manifest), len(encoded))
    return ChunkedVersion(memory, take_slot(memory, version), version, manifest)


def chunk_bytes(manifest: Sequence[TensorSpec]) -> int:
    """The most bytes of a chunk. One more relay in a chain costs the time of one chunk. A version has 256
    chunks, so a chunk costs less than 1/256 of a broadcast. A large version has more chunks, of 4 MiB."""
    share = sum(spec.num_bytes for spec in manifest) // CHUNKS
    return min(CHUNK_BYTES_MAX, (share // CHUNK_STEP_BYTES + 1) * CHUNK_STEP_BYTES)


def cut(view: Bytes, most: int) -> Iterator[Bytes]:
    """Cut a tensor's block into chunks of at most `most` bytes: runs of bytes if the block is contiguous,
    else groups of rows."""
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
