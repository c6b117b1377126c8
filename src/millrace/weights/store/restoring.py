"""How a version is made again: by a relay, from a directory into a slot by the shortest path without a
broken file; by a reader, from the deltas that its relay keeps (`history` has the relay's side).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import numpy as np

from millrace.core.digest import TensorSpec, published_digest
from millrace.core.errors import (
    TornVersionError,
    UnknownVersionError,
    WeightsError,
    WrongBaseError,
)
from millrace.weights.layout import Bytes, Memory, check_room, confirm, fill_in, take_slot
from millrace.weights.manifest import check_sequence, decode_manifest, digest_slot, read_manifest
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
            _fill_along(path, directory, memory, entries, present)
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


def _fill_along(
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


# ---------------------------------------------------------------- by a reader, from deltas


NAME = "millrace-past-"
LENGTH_BYTES = 8


class DeltaEntry(msgspec.Struct, frozen=True):
    """The entry of `version`: the deltas of its chunks, of `sizes` bytes, against `base`, a newer version.
    The digests are of whole tensors, as readers digest."""

    version: int
    digest: str
    base: int
    base_digest: str
    manifest: bytes
    sizes: list[int]


def rebuilt(memory: Memory, ring: str, version: int) -> tuple[str, list[TensorSpec], Bytes]:
    """Rebuild `version` in memory of this process: (digest under which it was staged, manifest, bytes).

    Args:
        ring: the path of `memory` among the relay's open files, /proc/PID/fd/FD.
    Raises: UnknownVersionError: the relay does not have the version. TornVersionError: a base was
    overwritten.
    """
    with _opened(ring) as files:
        path = delta_path(version, {v: entry for v, (entry, _) in files.items()}, slot_digests(memory))
        data = _copied(memory, path[-1].base)
        for entry in reversed(path):
            _go_back(entry, files[entry.version][1], data)
    last = path[0]
    return last.digest, decode_manifest(last.manifest, memory.slot_bytes, f"of version {version}"), data


def delta_versions(memory: Memory, ring: str) -> list[int]:
    """Versions in no slot that `rebuilt` can make."""
    with _opened(ring) as files:
        return reachable({version: entry for version, (entry, _) in files.items()}, memory)


def reachable(entries: Mapping[int, DeltaEntry], memory: Memory) -> list[int]:
    """Versions in no slot that deltas lead to; ascending."""
    in_slots, versions = slot_digests(memory), list[int]()
    for version in sorted(entries.keys() - in_slots.keys()):
        with suppress(UnknownVersionError):
            delta_path(version, entries, in_slots)
            versions.append(version)
    return versions


def delta_path(
    version: int, entries: Mapping[int, DeltaEntry], in_slots: Mapping[int, str]
) -> list[DeltaEntry]:
    """The deltas from a version in a slot to `version`, the last one first. Raises: UnknownVersionError."""
    path, at, expected = list[DeltaEntry](), version, ""
    while True:
        entry = entries.get(at)
        if entry is None or (path and entry.digest != expected) or entry.base <= at:
            raise UnknownVersionError(
                f"weights version {version} is not held; held: {sorted(in_slots)}. Pull the newest."
            )
        path.append(entry)
        at, expected = entry.base, entry.base_digest
        if in_slots.get(at) == expected:
            return path


def slot_digests(memory: Memory) -> dict[int, str]:
    """The digest of each complete version in a slot."""
    slots = [slot for slot in range(memory.slots) if memory.complete(slot)]
    return {memory.version(slot): memory.digest(slot) for slot in slots}


def _copied(memory: Memory, version: int) -> Bytes:
    """Raises: UnknownVersionError, TornVersionError."""
    if (place := memory.find(version)) is None:
        raise UnknownVersionError(f"weights version {version} was overwritten: pull the newest")
    weights = slot_weights(memory, *place)
    data: Bytes = weights.data.copy()
    weights.check()
    return data


def _go_back(entry: DeltaEntry, deltas: Bytes, data: Bytes) -> None:
    """Go one version back, in place. Raises: UnknownVersionError: the delta does not fit `data`."""
    try:
        apply_all(deltas[: sum(entry.sizes)], entry.sizes, data)
    except WeightsError as error:
        raise UnknownVersionError(f"weights version {entry.version} cannot be rebuilt: {error}") from error


@contextmanager
def _opened(ring: str) -> Iterator[dict[int, tuple[DeltaEntry, Bytes]]]:
    """The relay's delta files at this moment: entries, and views of the deltas."""
    with ExitStack() as stack:
        files = {}
        for path in _delta_files(ring):
            with suppress(OSError, ValueError, msgspec.MsgspecError):  # the relay closed it at this moment
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:  # else the relay still writes it
                    data = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
                    length = int.from_bytes(data[-LENGTH_BYTES:].tobytes(), "little")
                    encoded = data[-LENGTH_BYTES - length : -LENGTH_BYTES]
                    entry = msgspec.msgpack.decode(encoded.tobytes(), type=DeltaEntry)
                    files[entry.version] = entry, data
        yield files


def _delta_files(ring: str) -> Iterator[str]:
    """The paths of a ring's delta files."""
    directory, _, fd = ring.rpartition("/")
    with suppress(OSError):
        for number in os.listdir(directory):
            with suppress(OSError):
                if f":{NAME}{fd}-" in os.readlink(f"{directory}/{number}"):
                    yield f"{directory}/{number}"
