"""The memory that holds published weights: where everything is, who may write it, which slot a version gets,
and the sequence numbers before and after a write.

    header page      magic, format, number of slots, bytes per slot; then one record per slot
    manifest area    `MANIFEST_BYTES` per slot
    data area        `slot_bytes` per slot, each slot starting on a page

A record has two halves in cache lines of their own, so that no field has two writers:

    writer's half    sequence, version, manifest bytes       (the trainer's first process)
    relay's half     staged sequence, digest, pinned         (the relay)

**Seqlock.** `sequence` is odd while a slot is being written and grows with every write, so a sequence names
one filling of the slot. The relay stores in `staged` the sequence that it digested. A slot is readable only
while `staged == sequence` and both are even. If the slot was overwritten before, `staged` is an old sequence
and confirms nothing. Readers compare the sequence before and after they copy.

**Memory order.** Each record field is an aligned word, stored and loaded whole. x86 keeps the order of
stores and of loads. ARM may change the order: a reader there could in theory pass both checks with old bytes.
The replica would find the old bytes, because every replica digests its weights after a pull and compares.

**Access.** The memory is a memfd, which has no name in any file system. So the memory is freed when its
processes die, in any way. Processes of the run open `/proc/<pid>/fd/<fd>` of the relay. The kernel permits
only the same user, on the same host and in the same pid namespace. No socket listens. A mapping outlives the
relay. The file is sealed against resizing, so every mapped page stays valid.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.core.errors import UnknownVersionError, WeightsError
from millrace.core.types import Endpoint
from millrace.devices.large_memory import allocate, enter

MAGIC = b"MLLRACEW"
FORMAT = 4
PAGE = mmap.PAGESIZE
MANIFEST_BYTES = 4 << 20  # address space only: the kernel never allocates pages that no manifest reaches

HEADER = np.dtype([("magic", "S8"), ("format", "<u8"), ("slots", "<u8"), ("slot_bytes", "<u8")])
RECORD = np.dtype(
    {
        "names": ["sequence", "version", "manifest_bytes", "staged", "digest", "pinned"],
        "formats": ["<u8", "<i8", "<u8", "<u8", "S48", "<u8"],
        "offsets": [0, 8, 16, 64, 72, 120],
        "itemsize": 128,
    }
)
RECORDS_OFFSET = 64

Bytes = NDArray[np.uint8]


class Memory:
    """A mapped ring. Plain access to its fields; the protocol is the caller's.

    Attributes:
        records   (slots,) structured view of the slot records
        data      one uint8 view of `slot_bytes` per slot
        manifests one uint8 view of `MANIFEST_BYTES` per slot
    """

    def __init__(self, mapped: mmap.mmap, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self.records = np.frombuffer(mapped, RECORD, count=slots, offset=RECORDS_OFFSET)
        start, stride = _data_area(slots, slot_bytes)
        memory = np.frombuffer(mapped, np.uint8)
        first = start - slots * MANIFEST_BYTES
        self.manifests = [memory[first + i * MANIFEST_BYTES :][:MANIFEST_BYTES] for i in range(slots)]
        self.data = [memory[start + i * stride :][:slot_bytes] for i in range(slots)]
        self._area = memory[start : start + slots * stride]
        self._unpin: dict[int, Callable[[], None]] = {}  # by the address of a registered area

    def sequence(self, slot: int) -> int:
        return int(self.records["sequence"][slot])

    def version(self, slot: int) -> int:
        return int(self.records["version"][slot])

    def digest(self, slot: int) -> str:
        return bytes(self.records["digest"][slot]).decode(errors="replace")

    def written(self, slot: int) -> bool:
        """Whether the slot holds a whole version, staged or not."""
        sequence = self.sequence(slot)
        return sequence > 0 and sequence % 2 == 0

    def complete(self, slot: int) -> bool:
        """Whether the slot holds a staged version."""
        return self.written(slot) and int(self.records["staged"][slot]) == self.sequence(slot)

    def pinned(self, slot: int) -> bool:
        """Whether the relay still completes the slot's version: writers then prefer another slot."""
        return int(self.records["pinned"][slot]) == self.sequence(slot) > 0

    def versions(self) -> list[int]:
        """Staged versions, oldest first."""
        return sorted(self.version(slot) for slot in range(self.slots) if self.complete(slot))

    def find(self, version: int) -> tuple[int, int] | None:
        """(slot, sequence) of a staged version. The sequence is read first, so later checks find changes."""
        for slot in range(self.slots):
            sequence = self.sequence(slot)
            if self.complete(slot) and self.version(slot) == version:
                return slot, sequence
        return None

    def fill(self) -> None:
        """Allocate every page of the data area. Only the owner calls this, before any reader. So no publish
        has to wait for fresh pages. Raises: OSError: there is no such memory."""
        allocate(self._area)

    def register_areas(
        self, register: Callable[[Bytes], Callable[[], None]], areas: Sequence[Bytes] = ()
    ) -> None:
        """Register `areas`, or the data area, with a device that copies. Each area is registered once, until
        `close` calls the function that `register` returned."""
        for area in areas or (self._area,):
            if area.ctypes.data not in self._unpin:
                self._unpin[area.ctypes.data] = register(area)

    def close(self) -> None:
        """Release the mapping. From then on the ring looks empty. Idempotent."""
        while self._unpin:
            self._unpin.popitem()[1]()
        self._area = self._area[:0].copy()
        self.slots, self.data, self.manifests = 0, [], []
        self.records = self.records[:0].copy()

    def touch(self) -> None:
        """Enter every page of the data area into this process's page table."""
        enter(self._area)


def create(slots: int, slot_bytes: int) -> tuple[int, Memory]:
    """A new ring, owned by this process: (file descriptor, memory)."""
    start, stride = _data_area(slots, slot_bytes)
    fd = os.memfd_create("millrace-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, start + slots * stride)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(fd, 0)
        header = np.frombuffer(mapped, HEADER, count=1)
        header[0] = (MAGIC, FORMAT, slots, slot_bytes)
        return fd, Memory(mapped, slots, slot_bytes)
    except BaseException:
        os.close(fd)
        raise


def attach(endpoint: Endpoint, *, writable: bool) -> Memory:
    """Map the ring at `endpoint`. Only the trainer's writer asks for `writable`.

    Raises:
        UnknownVersionError: the relay is gone, or another process has its process id. Ask for the present
            endpoint.
        WeightsError: this build does not know the endpoint's kind.
    """
    if endpoint.kind != "memfd":
        raise WeightsError(f"weights endpoint of kind {endpoint.kind!r}: this build knows only 'memfd'")
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    try:
        fd = os.open(endpoint.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(fd, 0, access=access)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise UnknownVersionError(
            f"the weights at {endpoint.path} cannot be opened ({error}): is the relay alive, and does this "
            "process run as its user, on its host and in its pid namespace?"
        ) from error
    _check(mapped, endpoint)
    return Memory(mapped, endpoint.slots, endpoint.slot_bytes)


def _check(mapped: mmap.mmap, endpoint: Endpoint) -> None:
    expected = (MAGIC, FORMAT, endpoint.slots, endpoint.slot_bytes)
    header = None if len(mapped) < PAGE else np.frombuffer(mapped, HEADER, count=1)[0].item()
    if header != expected:
        raise UnknownVersionError(
            f"{endpoint.path} is not the ring of weights that was announced: expected (magic, format, slots, "
            f"slot bytes) = {expected}, found {header}. Open the relay's present endpoint."
        )


def _data_area(slots: int, slot_bytes: int) -> tuple[int, int]:
    """(offset of the first slot, distance between slots), in bytes, both whole pages."""
    header = _pages(RECORDS_OFFSET + slots * RECORD.itemsize)
    return header + slots * MANIFEST_BYTES, _pages(slot_bytes)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


# ---------------------------------------------------------------- the choice of a slot


def take_slot(memory: Memory, version: int) -> tuple[int, int]:
    """Begin to write `version`: (slot, sequence). The slot's earlier version becomes unreadable."""
    slot = _choose(memory, version)
    return slot, _begin(memory, slot)


def drop_above(memory: Memory, version: int) -> None:
    """Drop the versions above `version`: the trainer went back to a checkpoint, which undid their batches."""
    for slot in range(memory.slots):
        if memory.written(slot) and memory.version(slot) > version:
            _begin(memory, slot)


def fill_in(memory: Memory, slot: int, version: int, encoded: bytes) -> None:
    """Complete a version: write its encoded manifest, and make the sequence even."""
    memory.manifests[slot][: len(encoded)] = np.frombuffer(encoded, np.uint8)
    memory.records["version"][slot] = version
    memory.records["manifest_bytes"][slot] = len(encoded)
    memory.records["sequence"][slot] += 1


def complete_manifest(memory: Memory, slot: int, encoded: bytes) -> None:
    """The relay has fetched the blocks of other hosts: it writes the full manifest. Nobody reads the slot
    yet."""
    memory.manifests[slot][: len(encoded)] = np.frombuffer(encoded, np.uint8)
    memory.records["manifest_bytes"][slot] = len(encoded)


def confirm(memory: Memory, slot: int, sequence: int, digest: str) -> None:
    """Make a filling readable. Only the relay calls this, after it has digested the filling."""
    memory.records["digest"][slot] = digest.encode()
    memory.records["staged"][slot] = sequence


def check_room(memory: Memory, version: int, data_bytes: int, manifest_bytes: int) -> None:
    """Raise WeightsError if a slot has too little room."""
    if data_bytes > memory.slot_bytes:
        raise WeightsError(
            f"version {version} has {data_bytes} bytes, a slot has {memory.slot_bytes}: "
            "open the relay with the `slot_bytes` of the trainer's state"
        )
    if manifest_bytes > MANIFEST_BYTES:
        raise WeightsError(
            f"the manifest of version {version} has {manifest_bytes} bytes, {MANIFEST_BYTES} fit: "
            "publish fewer, larger tensors"
        )


def _choose(memory: Memory, version: int) -> int:
    """The slot that already has this version; else an unused slot; else the slot of the oldest version that
    is neither the newest staged version nor a version that the relay completes."""
    newest = max(memory.versions(), default=-1)

    def rank(slot: int) -> tuple[bool, bool, bool, bool, int]:
        used, present = memory.written(slot), memory.version(slot)
        served = memory.complete(slot) and present == newest
        return (not used or present != version, used, served, memory.pinned(slot), present)

    return min(range(memory.slots), key=rank)


def _begin(memory: Memory, slot: int) -> int:
    """Make the sequence odd, and different from all earlier ones."""
    sequence = memory.sequence(slot)
    memory.records["sequence"][slot] = sequence + 1 + sequence % 2
    return memory.sequence(slot)
