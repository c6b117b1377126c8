"""A reader's way to a version that its relay keeps as a delta. `past` has the relay's side."""

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
from millrace.weights.store.restoring import whole_in

NAME = "millrace-past-"
LENGTH_BYTES = 8


class DeltaEntry(msgspec.Struct, frozen=True):
    """What leads to `version`: the deltas of all chunks, of `sizes` bytes, against the next newer `base`. The
    digests are those of whole tensors, as readers take them."""

    version: int
    digest: str
    base: int
    base_digest: str
    manifest: bytes
    sizes: list[int]


def rebuilt(memory: Memory, ring: str, version: int) -> tuple[str, list[TensorSpec], Bytes]:
    """The reader's side: `version` in memory of this process, with the digest under which it was staged.

    Args:
        ring: the path of `memory` among the relay's open files, /proc/PID/fd/FD.
    Raises: UnknownVersionError: it is not held. TornVersionError: what it was made of was overwritten.
    """
    with _opened(ring) as found:
        entries = {kept: entry for kept, (entry, _) in found.items()}
        way = way_to(version, entries, whole_digests(memory))
        data = _copied(memory, way[-1].base)
        for entry in reversed(way):
            _follow(entry, found[entry.version][1], data)
    last = way[0]
    return last.digest, decode_manifest(last.manifest, memory.slot_bytes, f"of version {version}"), data


def kept(memory: Memory, ring: str) -> list[int]:
    """Versions that `rebuilt` can make, and that are in no slot."""
    with _opened(ring) as found:
        return reachable({version: entry for version, (entry, _) in found.items()}, memory)


def reachable(entries: Mapping[int, DeltaEntry], memory: Memory) -> list[int]:
    """Versions that are in no slot, and that deltas lead to; ascending."""
    whole, found = whole_digests(memory), list[int]()
    for version in sorted(entries.keys() - whole.keys()):
        with suppress(UnknownVersionError):
            way_to(version, entries, whole)
            found.append(version)
    return found


def way_to(version: int, entries: Mapping[int, DeltaEntry], whole: Mapping[int, str]) -> list[DeltaEntry]:
    """Those that lead from a whole version to this one, this one's first. Raises: UnknownVersionError."""
    way, at, expected = list[DeltaEntry](), version, ""
    while True:
        entry = entries.get(at)
        if entry is None or (way and entry.digest != expected) or entry.base <= at:
            raise UnknownVersionError(
                f"weights version {version} is not held; held: {sorted(whole)}. Pull the newest."
            )
        way.append(entry)
        at, expected = entry.base, entry.base_digest
        if whole.get(at) == expected:
            return way


def whole_digests(memory: Memory) -> dict[int, str]:
    """Of the versions that are whole in a slot."""
    slots = [slot for slot in range(memory.slots) if memory.complete(slot)]
    return {memory.version(slot): memory.digest(slot) for slot in slots}


def _copied(memory: Memory, version: int) -> Bytes:
    """Raises: UnknownVersionError, TornVersionError."""
    if (place := memory.find(version)) is None:
        raise UnknownVersionError(f"weights version {version} was overwritten: pull the newest")
    whole = whole_in(memory, *place)
    data: Bytes = whole.data.copy()
    whole.check()
    return data


def _follow(entry: DeltaEntry, deltas: Bytes, data: Bytes) -> None:
    """Go one version back, in place. Raises: UnknownVersionError: it does not lead there."""
    try:
        apply_all(deltas[: sum(entry.sizes)], entry.sizes, data)
    except WeightsError as error:
        raise UnknownVersionError(f"weights version {entry.version} cannot be rebuilt: {error}") from error


@contextmanager
def _opened(ring: str) -> Iterator[dict[int, tuple[DeltaEntry, Bytes]]]:
    """What the relay keeps at this moment: entries, and deltas where they lie."""
    with ExitStack() as stack:
        found = {}
        for path in _named(ring):
            with suppress(OSError, ValueError, msgspec.MsgspecError):  # it went in this moment
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:  # else it is still being made
                    data = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
                    length = int.from_bytes(data[-LENGTH_BYTES:].tobytes(), "little")
                    encoded = data[-LENGTH_BYTES - length : -LENGTH_BYTES]
                    entry = msgspec.msgpack.decode(encoded.tobytes(), type=DeltaEntry)
                    found[entry.version] = entry, data
        yield found


def _named(ring: str) -> Iterator[str]:
    """The memory files of older versions of a ring."""
    files, _, fd = ring.rpartition("/")
    with suppress(OSError):
        for number in os.listdir(files):
            with suppress(OSError):
                if f":{NAME}{fd}-" in os.readlink(f"{files}/{number}"):
                    yield f"{files}/{number}"
