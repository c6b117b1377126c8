"""Older versions of a relay: each as what it differs by from the next newer one.

Slots have the newest versions whole. While two are whole, the relay makes the delta that leads from the newer
back to the older. When the older one's slot has been taken, a reader still gets it: it copies a whole version
into memory of its own, and follows the deltas down.

    v9 whole, v10 whole;  v8 <- v9, v7 <- v8, v6 <- v7      a reader of v6: copy v9, apply three deltas

A delta is in a memory file of its own: those of its chunks, then a `DeltaEntry`, then its length. It is
sealed against writing when it is complete, so a reader needs no lock and sees all of it or nothing. Readers
find it among the relay's open files, by name. A file that the relay has closed goes with its last reader.

The oldest goes when all have more than `bytes_max`. A delta knows the bytes that it was made against, so what
a wrong one leads to is never read; and every replica digests what it has read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from itertools import pairwise

import msgspec

from millrace.core.errors import TornVersionError, UnknownVersionError, WeightsError
from millrace.weights.layout import Memory
from millrace.weights.store.background import BackgroundThread, told
from millrace.weights.store.directory import Whole, as_laid_out, chunk_deltas
from millrace.weights.store.rebuilding import LENGTH_BYTES, NAME, DeltaEntry, reachable, way_to, whole_digests
from millrace.weights.store.restoring import wholes

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class OlderVersions:
    """The relay's side. It keeps at most `versions_max` of them, in `bytes_max` together. `ring_fd` is the
    descriptor of `memory`, by which readers know it. `keeping` is asked whenever another version is whole."""

    def __init__(self, memory: Memory, ring_fd: int, *, bytes_max: int, versions_max: int) -> None:
        self._memory, self.bytes_max, self._versions_max = memory, bytes_max, versions_max
        self._name = f"{NAME}{ring_fd}-"
        self._files: dict[int, tuple[DeltaEntry, int]] = {}  # by version: and its descriptor
        self._known: set[int] = set()  # that readers could have
        self._why: dict[int, str] = {}
        self._dropped: dict[int, str] = {}
        self._lock = threading.Lock()
        self.keeping = BackgroundThread("keep older weights as deltas", self.keep)

    @property
    def num_bytes(self) -> int:
        """Of all files, as the kernel counts them."""
        return sum(os.fstat(fd).st_blocks * 512 for _, fd in list(self._files.values()))

    def versions(self) -> list[int]:
        """Those that are in no slot, and that readers can have; ascending."""
        return reachable(self._entries, self._memory)

    @property
    def _entries(self) -> dict[int, DeltaEntry]:
        return {version: entry for version, (entry, _) in list(self._files.items())}

    def take_dropped(self) -> dict[int, str]:
        """Versions that nobody can have any more since the last call, and why."""
        with self._lock:
            taken, self._dropped = self._dropped, {}
            return taken

    def forget(self, version: int) -> None:
        """This one and those above it were undone, or are made again."""
        with self._lock:
            for undone in [known for known in self._files if known >= version]:
                self._close(undone)
            self._known = {known for known in self._known if known < version}

    def keep(self) -> None:
        """Make what is missing, drop what leads nowhere, and note which versions are gone."""
        found = sorted(wholes(self._memory), key=lambda whole: whole.version)
        digests = whole_digests(self._memory)
        for old, new in pairwise(found):
            digest, base_digest = digests.get(old.version, ""), digests.get(new.version, "")
            if digest and base_digest and not self._leads_to(old.version, digest):
                try:
                    self._make(old, new, digest, base_digest)
                except TornVersionError:
                    self._why[old.version] = "its slot was taken before it was kept as a delta"
                except Exception as error:  # the versions that follow are kept again
                    self._why[old.version] = told(error)
        with self._lock:
            now = {*whole_digests(self._memory), *self.versions()}
            for lost in [version for version in self._files if version not in now]:
                self._close(lost)
            gone = {
                v: self._why.get(v, "a newer version, which leads to it, is gone") for v in self._known - now
            }
            self._dropped |= gone
            self._known = now
            self._why = {version: why for version, why in self._why.items() if version in now}

    def _leads_to(self, version: int, digest: str) -> bool:
        try:
            return way_to(version, self._entries, whole_digests(self._memory))[0].digest == digest
        except UnknownVersionError:
            return False

    def _make(self, old: Whole, new: Whole, digest: str, base_digest: str) -> None:
        """Raises: TornVersionError, WeightsError (no room for it), OSError."""
        if not as_laid_out(old, new):
            raise WeightsError(f"the tensors of version {new.version} lie otherwise than its own")
        sizes, name = list[int](), f"{self._name}{old.version}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for delta in chunk_deltas(old, new):
                old.check()
                new.check()
                sizes.append(len(delta))
                self._make_room(sum(sizes), old.version)
                _write(fd, delta)
            entry = DeltaEntry(old.version, digest, new.version, base_digest, old.encoded, sizes)
            encoded = msgspec.msgpack.encode(entry)
            self._make_room(sum(sizes) + len(encoded) + LENGTH_BYTES, old.version)
            _write(fd, encoded + len(encoded).to_bytes(LENGTH_BYTES, "little"))
            old.check()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._files[old.version] = entry, fd
            self._why.pop(old.version, None)

    def _make_room(self, num_bytes: int, version: int) -> None:
        """For a file of so many bytes. Older ones go, the oldest first. Raises: WeightsError: that is not
        enough."""
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._close(version)  # led from a base that is gone
            while self.num_bytes + num_bytes > self.bytes_max or len(self._files) >= self._versions_max:
                oldest = min(self._files, default=version)
                if oldest >= version:
                    raise WeightsError(
                        f"its delta has {num_bytes:,} bytes or more, and the relay has "
                        f"{self.bytes_max:,} for at most {self._versions_max} of them"
                    )
                self._why[oldest] = f"no room: newer ones fill the {self.bytes_max:,} bytes for deltas"
                self._close(oldest)

    def _close(self, version: int) -> None:
        if (file := self._files.pop(version, None)) is not None:
            os.close(file[1])


def _write(fd: int, data: bytes) -> None:
    """All of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
