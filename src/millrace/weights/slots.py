"""Which slot a version is written into, and the sequence number round its writing. See `layout`."""

from __future__ import annotations

import numpy as np

from millrace.core.errors import WeightsError
from millrace.weights.layout import MANIFEST_BYTES, Memory


def take_slot(memory: Memory, version: int) -> tuple[int, int]:
    """Begin to write `version`: (slot, sequence). What the slot held is unreadable from here on."""
    slot = _choose(memory, version)
    return slot, _begin(memory, slot)


def drop_above(memory: Memory, version: int) -> None:
    """What was above it came from steps that were undone when the trainer went back to a checkpoint."""
    for slot in range(memory.slots):
        if memory.written(slot) and memory.version(slot) > version:
            _begin(memory, slot)


def fill_in(memory: Memory, slot: int, version: int, encoded: bytes) -> None:
    """The version is whole: give it its encoded manifest, and make the sequence even."""
    memory.manifests[slot][: len(encoded)] = np.frombuffer(encoded, np.uint8)
    memory.records["version"][slot] = version
    memory.records["manifest_bytes"][slot] = len(encoded)
    memory.records["sequence"][slot] += 1


def complete_manifest(memory: Memory, slot: int, encoded: bytes) -> None:
    """What other hosts wrote of a version is here too: the relay says so, in a slot that nobody reads yet."""
    memory.manifests[slot][: len(encoded)] = np.frombuffer(encoded, np.uint8)
    memory.records["manifest_bytes"][slot] = len(encoded)


def confirm(memory: Memory, slot: int, sequence: int, digest: str) -> None:
    """Make a filling readable. Only the relay, once it has digested it."""
    memory.records["digest"][slot] = digest.encode()
    memory.records["staged"][slot] = sequence


def check_room(memory: Memory, version: int, data_bytes: int, manifest_bytes: int) -> None:
    """Raise WeightsError if a slot has no room for that much."""
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
    """The slot that holds this version already, else an unused one, else the oldest that is not the newest
    staged version, nor one that the relay is completing."""
    newest = max(memory.held(), default=-1)

    def rank(slot: int) -> tuple[bool, bool, bool, bool, int]:
        used, held = memory.written(slot), memory.version(slot)
        served = memory.complete(slot) and held == newest
        return (not used or held != version, used, served, memory.pinned(slot), held)

    return min(range(memory.slots), key=rank)


def _begin(memory: Memory, slot: int) -> int:
    """Make the sequence odd and new."""
    sequence = memory.sequence(slot)
    memory.records["sequence"][slot] = sequence + 1 + sequence % 2
    return memory.sequence(slot)
