"""Older versions of a relay, each as a delta against the next newer version. They are made in the
background: no call of the relay waits.

Slots have the newest versions. While two versions are in slots, the relay makes the delta from the newer
version back to the older version. A reader can still get the older version after another version took its
slot: the reader copies a version from a slot into its own memory, and applies the deltas.

    v9, v10 in slots;  v8 <- v9, v7 <- v8, v6 <- v7      a reader of v6: copy v9, apply three deltas

Each delta has a memory file: the deltas of its chunks, then a `DeltaEntry`, then the entry's length. The
relay seals a complete file against writing, so a reader needs no lock and sees all of the file or nothing.
Readers find the file by name among the relay's open files. The kernel frees a closed file after its last
reader.

If the files together exceed `bytes_max`, the relay closes the oldest file. A delta has a checksum of its
base, so no reader applies a delta to other bytes. Every replica digests the version that it read.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable
from itertools import pairwise

import msgspec

from millrace.core.errors import MillraceError, TornVersionError, UnknownVersionError, WeightsError
from millrace.weights.layout import Memory
from millrace.weights.store.directory import SlotWeights, chunk_deltas, expected_delta_bytes, same_layout
from millrace.weights.store.restoring import (
    LENGTH_BYTES,
    NAME,
    DeltaEntry,
    all_slot_weights,
    delta_path,
    reachable,
    slot_digests,
)

LOG = logging.getLogger(__name__)

SURELY = 1.25  # a sample is off by less
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class OlderVersions:
    """The relay's side: at most `versions_max` deltas, of `bytes_max` together. `ring_fd`: the descriptor of
    `memory`, which is in the files' names. The relay asks `keeping` after each new version."""

    def __init__(self, memory: Memory, ring_fd: int, *, bytes_max: int, versions_max: int) -> None:
        self._memory, self.bytes_max, self._versions_max = memory, bytes_max, versions_max
        self._name = f"{NAME}{ring_fd}-"
        self._files: dict[int, tuple[DeltaEntry, int]] = {}  # by version: (entry, file descriptor)
        self._readable: set[int] = set()  # versions that readers could get at the last look
        self._reasons: dict[int, str] = {}
        self._dropped: dict[int, str] = {}
        self._lock = threading.Lock()
        self.keeping = BackgroundThread("keep older weights as deltas", self.keep)

    @property
    def num_bytes(self) -> int:
        """The memory of all files, as the kernel counts it."""
        return sum(os.fstat(fd).st_blocks * 512 for _, fd in list(self._files.values()))

    def versions(self) -> list[int]:
        """Versions in no slot that readers can get; ascending."""
        return reachable(self._entries, self._memory)

    @property
    def _entries(self) -> dict[int, DeltaEntry]:
        return {version: entry for version, (entry, _) in list(self._files.items())}

    def take_dropped(self) -> dict[int, str]:
        """Versions that no reader can get any more since the last call, each with the reason."""
        with self._lock:
            dropped, self._dropped = self._dropped, {}
            return dropped

    def forget(self, version: int) -> None:
        """Forget `version` and the versions above it: the trainer undid them, or makes them again."""
        with self._lock:
            for undone in [v for v in self._files if v >= version]:
                self._close(undone)
            self._readable = {v for v in self._readable if v < version}

    def keep(self) -> None:
        """Make missing deltas, close deltas without a base, and note the versions that are gone."""
        in_slots = sorted(all_slot_weights(self._memory), key=lambda weights: weights.version)
        digests = slot_digests(self._memory)
        for old, new in pairwise(in_slots):
            digest, base_digest = digests.get(old.version, ""), digests.get(new.version, "")
            if digest and base_digest and not self._leads_to(old.version, digest):
                try:
                    self._make(old, new, digest, base_digest)
                except TornVersionError:
                    self._reasons[old.version] = "its slot was taken before it was kept as a delta"
                except Exception as error:  # the relay still keeps the versions that follow
                    self._reasons[old.version] = reason_of(error)
        with self._lock:
            readable = {*slot_digests(self._memory), *self.versions()}
            for version in self._files.keys() - readable:
                self._close(version)
            for version in self._readable - readable:
                reason = self._reasons.get(version, "a newer version, which leads to it, is gone")
                self._dropped[version] = reason
            self._readable = readable
            self._reasons = {v: reason for v, reason in self._reasons.items() if v in readable}

    def _leads_to(self, version: int, digest: str) -> bool:
        try:
            return delta_path(version, self._entries, slot_digests(self._memory))[0].digest == digest
        except UnknownVersionError:
            return False

    def _make(self, old: SlotWeights, new: SlotWeights, digest: str, base_digest: str) -> None:
        """Make the delta of `old`. Raises: TornVersionError, WeightsError (no room), OSError."""
        if not same_layout(old, new):
            raise WeightsError(f"the tensors of version {new.version} lie otherwise than its own")
        expected = expected_delta_bytes(old, new)
        old.check()
        new.check()
        if expected > SURELY * self.bytes_max:  # most of it would be made in vain, version by version
            raise WeightsError(self._no_room(f"about {expected:,} bytes"))
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
            self._reasons.pop(old.version, None)

    def _make_room(self, num_bytes: int, version: int) -> None:
        """Close older files, the oldest first, until a file of `num_bytes` has room. Raises: WeightsError:
        even then no room."""
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._close(version)  # an earlier delta of the version, whose base is gone
            while self.num_bytes + num_bytes > self.bytes_max or len(self._files) >= self._versions_max:
                oldest = min(self._files, default=version)
                if oldest >= version:
                    raise WeightsError(self._no_room(f"{num_bytes:,} bytes or more"))
                self._reasons[oldest] = f"no room: newer ones fill the {self.bytes_max:,} bytes for deltas"
                self._close(oldest)

    def _no_room(self, size: str) -> str:
        return f"its delta has {size}, and the relay has {self.bytes_max:,} for {self._versions_max} at most"

    def _close(self, version: int) -> None:
        if (file := self._files.pop(version, None)) is not None:
            os.close(file[1])


def _write(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# ---------------------------------------------------------------- in the background


class BackgroundThread:
    """Does `work` in a thread of its own after each `ask`. An `ask` during the work makes the thread work
    once more. An error ends only the work in progress, and goes to the process's log. The thread dies with
    the process."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name, self._work = name, work
        self._lock = threading.Lock()
        self._requested = self._working = False

    @property
    def idle(self) -> bool:
        """Whether all requested work is done."""
        return not self._working

    def ask(self) -> None:
        """Request the work. Returns at once. If no thread can start, the next `ask` tries again."""
        with self._lock:
            self._requested = True
            if self._working:
                return
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._working = True
            except RuntimeError as error:
                LOG.warning("cannot %s: %s", self._name, error)

    def _run(self) -> None:
        while self._take_request():
            try:
                self._work()
            except Exception:
                LOG.exception("cannot %s", self._name)

    def _take_request(self) -> bool:
        with self._lock:
            self._working, self._requested = self._requested, False
            return self._working


def reason_of(error: Exception) -> str:
    """The error's message, with its type if the error is not Millrace's."""
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
