"""A relay that writes versions to a directory or bucket, in a thread of its own: nobody waits for storage."""

from __future__ import annotations

import time

from millrace.core.errors import UnknownVersionError
from millrace.core.types import Stored
from millrace.weights.layout import Memory
from millrace.weights.store.background import BackgroundThread, told
from millrace.weights.store.directory import Directory, Whole
from millrace.weights.store.restoring import wholes


class Storer:
    """Writes the newest version that it was asked for; one that came and went meanwhile is left out. A store
    that hangs holds up later ones and nothing else."""

    def __init__(self, directory: Directory, memory: Memory, *, anchor_every: int) -> None:
        self._directory, self._memory, self._anchor_every = directory, memory, anchor_every
        self._asked, self._last = (-1, ""), Stored(-1, "")
        self._storing = BackgroundThread("store weights", self._store)

    def ask(self, version: int, digest: str) -> Stored:
        """Write this one next, unless it was the last. Returns how the last one ended."""
        if (version, digest) != (self._last.version, self._last.digest):
            self._asked = version, digest
            self._storing.ask()
        return self._last

    def _store(self) -> None:
        version, digest = self._asked
        if (version, digest) == (self._last.version, self._last.digest):
            return
        began = time.perf_counter()
        try:
            whole, written = self._written(version, digest)
        except Exception as error:
            self._last = Stored(version, digest, reason=told(error))
        else:
            self._last = Stored(version, digest, len(whole.data), written, time.perf_counter() - began)

    def _written(self, version: int, digest: str) -> tuple[Whole, dict[str, int]]:
        """Raises: MillraceError."""
        found = {(one.version, one.digest): one for one in wholes(self._memory)}
        if (whole := found.pop((version, digest), None)) is None:
            raise UnknownVersionError(f"weights version {version} is in no slot any more")
        kept = self._memory.slots
        return whole, self._directory.write(whole, found.values(), anchor_every=self._anchor_every, kept=kept)
