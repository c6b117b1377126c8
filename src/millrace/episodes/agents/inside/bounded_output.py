"""What an agent prints: the beginning in a file, the end in memory, and a count of the bytes between."""

from __future__ import annotations

import os

FILE_BYTES_MAX = 2**20
LAST_BYTES = 64 * 1024


class BoundedOutput:
    """Takes any number of bytes, and keeps `FILE_BYTES_MAX` in the file `path` and the last `LAST_BYTES`.

    A file that cannot be written does not stop an agent: its bytes count as dropped.
    """

    def __init__(self, path: str) -> None:
        self.dropped = 0
        self._room, self._last = FILE_BYTES_MAX, bytearray()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)

    def add(self, data: bytes) -> None:
        written = self._write(data[: self._room])
        self._room -= written
        self.dropped += len(data) - written
        self._last += data
        if len(self._last) > 4 * LAST_BYTES:
            del self._last[:-LAST_BYTES]

    def close(self) -> None:
        if self.dropped:
            self._write(f"\n[{self.dropped:,} bytes more were printed, and are not in this file]\n".encode())
        os.close(self._file)

    @property
    def last_words(self) -> str:
        return self._last[-LAST_BYTES:].decode(errors="replace")

    def _write(self, data: bytes) -> int:
        """Returns the number of bytes that the file took."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:  # the disk is full
            self._room = written
        return written
