"""How a relay gets a version from a directory into a slot: by the shortest way, round what is broken."""

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
from millrace.weights.store.directory import Directory, Whole, apply_all, file_name
from millrace.weights.store.restore_paths import ANCHOR, DELTA, StoredVersion, Way, shortest


class _Broken(Exception):
    """A file of the way is of no use."""

    def __init__(self, version: int, kind: str, why: object) -> None:
        super().__init__(f"the {kind} of version {version}: {why}")
        self.file = version, kind


def restore(directory: Directory, memory: Memory, version: int, digest: str) -> int:
    """Read `version`, published with `digest`, into a slot, check every piece, and make it readable.

    A file that is missing or damaged is left out, and the next shortest way taken: at last an anchor alone.

    Returns: bytes read.
    Raises:
        UnknownVersionError: no way leads there; it names what was broken.
        TornVersionError: the slot was taken for another version meanwhile.
        WeightsError: the directory cannot be read, or a slot has no room.
    """
    entries = directory.entries()
    broken: dict[tuple[int, str], str] = {}
    num_bytes = 0
    while True:
        held = {whole.version: whole for whole in wholes(memory)}
        digests = {v: whole.digest for v, whole in held.items()}
        way = shortest(entries, version, digest, digests, broken.keys())
        if way is None or version not in entries:
            there = [entry.version for entry in entries.values()]
            raise UnknownVersionError(
                f"weights version {version} ({digest}) cannot be had from {directory.url}: it has {there}; "
                f"{'; '.join(broken.values()) or 'none is broken'}"
            )
        num_bytes += way.num_bytes
        try:
            _follow(way, directory, memory, entries, held)
            return num_bytes
        except _Broken as error:
            broken[error.file] = str(error)


def wholes(memory: Memory) -> Iterator[Whole]:
    """Every version that is readable in a slot, as it was published."""
    for slot in range(memory.slots):
        sequence = memory.sequence(slot)
        if memory.complete(slot):
            with suppress(TornVersionError, WeightsError):  # overwritten in this moment
                yield whole_in(memory, slot, sequence)


def whole_in(memory: Memory, slot: int, sequence: int) -> Whole:
    """What is in a slot. Raises TornVersionError, WeightsError (its manifest is damaged)."""
    encoded = bytes(memory.manifests[slot][: int(memory.records["manifest_bytes"][slot])])
    manifest, version = read_manifest(memory, slot, sequence), memory.version(slot)
    num_bytes = max((spec.offset + spec.num_bytes for spec in manifest), default=0)
    data = memory.data[slot][:num_bytes]
    check_sequence(memory, slot, sequence)
    return Whole(
        version,
        published_digest(manifest),
        encoded,
        manifest,
        data,
        lambda: check_sequence(memory, slot, sequence),
    )


def _follow(
    way: Way, directory: Directory, memory: Memory, entries: dict[int, StoredVersion], held: dict[int, Whole]
) -> None:
    """Raises: _Broken."""
    version = way.deltas[-1] if way.deltas else way.start
    entry = entries[version]
    check_room(memory, version, entry.num_bytes, len(entry.manifest))
    slot, sequence = take_slot(memory, version)
    data = memory.data[slot][: entry.num_bytes]
    if not way.anchor:
        base = held[way.start].data
        if len(base) != len(data):
            raise _Broken(way.deltas[0], DELTA, f"of {len(data)} bytes against {len(base)}")
        if base.ctypes.data != data.ctypes.data:
            np.copyto(data, base)
    else:
        try:
            directory.read_anchor(way.start, data)
        except WeightsError as error:
            raise _Broken(way.start, ANCHOR, error) from error
    for number, link in enumerate(way.deltas):
        try:
            apply_all(memoryview(directory.read(file_name(link, "delta"))), entries[link].deltas, data)
        except WrongBaseError as error:
            first = way.anchor and not number
            raise _Broken(way.start if first else link, ANCHOR if first else DELTA, error) from error
        except WeightsError as error:
            raise _Broken(link, DELTA, error) from error
    check_sequence(memory, slot, sequence)
    fill_in(memory, slot, version, entry.manifest)
    try:
        whole, found = digest_slot(memory, slot, read_manifest(memory, slot, sequence + 1))
    except TornVersionError:
        raise
    except WeightsError as error:
        raise _Broken(version, DELTA if way.deltas else ANCHOR, error) from error
    if found != entry.digest:
        kind = DELTA if way.deltas else ANCHOR
        raise _Broken(version, kind, f"what it leads to has digest {found}, and not {entry.digest}")
    check_sequence(memory, slot, sequence + 1)
    confirm(memory, slot, sequence + 1, whole)
