"""How a reader rebuilds a version that its relay keeps as a delta. `history` has the relay's side."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import numpy as np

from millrace.core.digest import TensorSpec
from millrace.core.errors import UnknownVersionError, WeightsError
from millrace.weights.layout import Bytes, Memory
from millrace.weights.manifest import decode_manifest
from millrace.weights.store.directory import apply_all
from millrace.weights.store.restoring import slot_weights

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
            _follow(entry, files[entry.version][1], data)
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


def _follow(entry: DeltaEntry, deltas: Bytes, data: Bytes) -> None:
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
