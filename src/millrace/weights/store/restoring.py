"""How a relay restores a version from a directory into a slot: by the shortest path without a broken file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from millrace.core.digest import published_digest
from millrace.core.errors import (
    TornVersionError,
    UnknownVersionError,
    WeightsError,
    WrongBaseError,
)
from millrace.weights.layout import Memory
from millrace.weights.manifest import check_sequence, digest_slot, read_manifest
from millrace.weights.slots import check_room, confirm, fill_in, take_slot
from millrace.weights.store.directory import Directory, SlotWeights, apply_all, file_name
from millrace.weights.store.restore_paths import ANCHOR, DELTA, RestorePath, StoredVersion, shortest_path


class _Broken(Exception):
    """A file of the path is missing or damaged."""

    def __init__(self, version: int, kind: str, reason: object) -> None:
        super().__init__(f"the {kind} of version {version}: {reason}")
        self.file = version, kind


def restore(directory: Directory, memory: Memory, version: int, digest: str) -> int:
    """Read `version`, published with `digest`, into a slot, check every block, and make the version readable.

    If a file is missing or damaged, the relay takes the next shortest path without that file.

    Returns: bytes read.
    Raises:
        UnknownVersionError: no path leads to the version; the error names the broken files.
        TornVersionError: another version took the slot.
        WeightsError: the directory cannot be read, or a slot has no room.
    """
    entries = directory.entries()
    broken: dict[tuple[int, str], str] = {}
    num_bytes = 0
    while True:
        present = {weights.version: weights for weights in all_slot_weights(memory)}
        digests = {v: weights.digest for v, weights in present.items()}
        path = shortest_path(entries, version, digest, digests, broken.keys())
        if path is None or version not in entries:
            raise UnknownVersionError(
                f"weights version {version} ({digest}) cannot be had from {directory.url}: it has "
                f"{sorted(entries)}; {'; '.join(broken.values()) or 'none is broken'}"
            )
        num_bytes += path.num_bytes
        try:
            _follow(path, directory, memory, entries, present)
            return num_bytes
        except _Broken as error:
            broken[error.file] = str(error)


def all_slot_weights(memory: Memory) -> Iterator[SlotWeights]:
    """Every version that is readable in a slot, with its published digest."""
    for slot in range(memory.slots):
        sequence = memory.sequence(slot)
        if memory.complete(slot):
            with suppress(TornVersionError, WeightsError):  # overwritten at this moment
                yield slot_weights(memory, slot, sequence)


def slot_weights(memory: Memory, slot: int, sequence: int) -> SlotWeights:
    """The version in a slot. Raises TornVersionError, WeightsError (its manifest is damaged)."""
    encoded = bytes(memory.manifests[slot][: int(memory.records["manifest_bytes"][slot])])
    manifest, version = read_manifest(memory, slot, sequence), memory.version(slot)
    num_bytes = max((spec.offset + spec.num_bytes for spec in manifest), default=0)
    data = memory.data[slot][:num_bytes]
    check_sequence(memory, slot, sequence)
    return SlotWeights(
        version,
        published_digest(manifest),
        encoded,
        manifest,
        data,
        lambda: check_sequence(memory, slot, sequence),
    )


def _follow(
    path: RestorePath,
    directory: Directory,
    memory: Memory,
    entries: dict[int, StoredVersion],
    present: dict[int, SlotWeights],
) -> None:
    """Raises: _Broken."""
    version = path.deltas[-1] if path.deltas else path.start
    entry = entries[version]
    check_room(memory, version, entry.num_bytes, len(entry.manifest))
    slot, sequence = take_slot(memory, version)
    data = memory.data[slot][: entry.num_bytes]
    if not path.anchor:
        base = present[path.start].data
        if len(base) != len(data):
            raise _Broken(path.deltas[0], DELTA, f"of {len(data)} bytes against {len(base)}")
        if base.ctypes.data != data.ctypes.data:
            np.copyto(data, base)
    else:
        try:
            directory.read_anchor(path.start, data)
        except WeightsError as error:
            raise _Broken(path.start, ANCHOR, error) from error
    for number, delta in enumerate(path.deltas):
        try:
            apply_all(memoryview(directory.read(file_name(delta, "delta"))), entries[delta].deltas, data)
        except WrongBaseError as error:
            first = path.anchor and not number
            raise _Broken(path.start if first else delta, ANCHOR if first else DELTA, error) from error
        except WeightsError as error:
            raise _Broken(delta, DELTA, error) from error
    check_sequence(memory, slot, sequence)
    fill_in(memory, slot, version, entry.manifest)
    kind = DELTA if path.deltas else ANCHOR
    try:
        tensors_digest, digest = digest_slot(memory, slot, read_manifest(memory, slot, sequence + 1))
    except TornVersionError:
        raise
    except WeightsError as error:
        raise _Broken(version, kind, error) from error
    if digest != entry.digest:
        raise _Broken(version, kind, f"the restored version has digest {digest}, and not {entry.digest}")
    check_sequence(memory, slot, sequence + 1)
    confirm(memory, slot, sequence + 1, tensors_digest)
