"""A relay that writes versions to a directory or bucket, in a thread of its own: nobody waits for storage."""

from __future__ import annotations

import threading
import time

from millrace.core.errors import MillraceError, UnknownVersionError
from millrace.core.types import Stored
from millrace.weights.directory import Directory
from millrace.weights.layout import Memory
from millrace.weights.restoring import wholes


class Storer:
    """Writes the newest version that it was asked for; one that came and went meanwhile is left out.

    A store that hangs holds up later ones and nothing else. Its thread dies with the process.
    """

    def __init__(self, directory: Directory, memory: Memory, *, anchor_every: int) -> None:
        self._directory, self._memory, self._anchor_every = directory, memory, anchor_every
        self._lock = threading.Lock()
        self._asked: tuple[int, str] | None = None
        self._working = False
        self._last = Stored(-1, "")

    def ask(self, version: int, digest: str) -> Stored:
        """Write this one next, unless it was the last. Returns how the last one ended."""
        with self._lock:
            if (self._last.version, self._last.digest) != (version, digest):
                self._asked = version, digest
                if not self._working:
                    self._working = True
                    threading.Thread(target=self._run, name="store weights", daemon=True).start()
            return self._last

    def _run(self) -> None:
        """Ends when nothing is asked for."""
        while True:
            with self._lock:
                asked, self._asked = self._asked, None
                if asked is None or asked == (self._last.version, self._last.digest):
                    self._working = False
                    return
            ended = self._store(*asked)
            with self._lock:
                self._last = ended

    def _store(self, version: int, digest: str) -> Stored:
        began = time.perf_counter()
        try:
            found = {(one.version, one.digest): one for one in wholes(self._memory)}
            if (whole := found.pop((version, digest), None)) is None:
                raise UnknownVersionError(f"weights version {version} is in no slot any more")
            kept = self._memory.slots
            told = self._directory.write(whole, found.values(), anchor_every=self._anchor_every, kept=kept)
        except MillraceError as error:
            return Stored(version, digest, reason=str(error))
        return Stored(version, digest, len(whole.data), told, time.perf_counter() - began)
