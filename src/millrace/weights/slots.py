"""The choice of the slot for a version, and the sequence numbers before and after a write. See `layout`."""

from __future__ import annotations

import numpy as np

from millrace.core.errors import WeightsError
from millrace.weights.layout import MANIFEST_BYTES, Memory


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
