"""How a relay writes versions to a directory or bucket: in a thread of its own, so no call waits for
storage."""

from __future__ import annotations

import time

from millrace.core.errors import UnknownVersionError
from millrace.core.types import Stored
from millrace.weights.layout import Memory
from millrace.weights.store.background import BackgroundThread, reason_of
from millrace.weights.store.directory import Directory
from millrace.weights.store.restoring import all_slot_weights


class Storer:
    """Writes the newest requested version. It skips a version if a newer one is requested before the write
    begins. A write that hangs delays later writes and nothing else."""

    def __init__(self, directory: Directory, memory: Memory, *, anchor_every: int) -> None:
        self._directory, self._memory, self._anchor_every = directory, memory, anchor_every
        self._request, self._last = (-1, ""), Stored(-1, "")
        self._storing = BackgroundThread("store weights", self._store)

    def ask(self, version: int, digest: str) -> Stored:
        """Write this version next, unless it was written last. Returns how the last write ended."""
        if (version, digest) != (self._last.version, self._last.digest):
            self._request = version, digest
            self._storing.ask()
        return self._last

    def _store(self) -> None:
        version, digest = self._request
        if (version, digest) == (self._last.version, self._last.digest):
            return
        began = time.perf_counter()
        try:
            weights_bytes, written = self._write(version, digest)
        except Exception as error:
            self._last = Stored(version, digest, reason=reason_of(error))
        else:
            self._last = Stored(version, digest, weights_bytes, written, time.perf_counter() - began)

    def _write(self, version: int, digest: str) -> tuple[int, dict[str, int]]:
        """(bytes of the version, as `Directory.write` returns). Raises: MillraceError."""
        bases = {(base.version, base.digest): base for base in all_slot_weights(self._memory)}
        if (weights := bases.pop((version, digest), None)) is None:
            raise UnknownVersionError(f"weights version {version} is in no slot any more")
        every, keep = self._anchor_every, self._memory.slots
        written = self._directory.write(weights, bases.values(), anchor_every=every, keep=keep)
        return len(weights.data), written
