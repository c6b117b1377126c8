"""Watches the write-ahead log, because SQLite takes a cut, damaged or deleted log for a shorter log.

The file `ledger.sqlite.mark` names the newest committed version. The mark is written durably after each
commit, and removed when a clean end has folded the log into the file. A ledger with fewer steps than its mark
says was rolled back.
"""

from __future__ import annotations

import os
from contextlib import suppress

import xxhash

from millrace.core.errors import LedgerError, writing
from millrace.ledger.opening import MEMORY


class Log:
    """The log of the ledger at `path`, and its mark. For a ledger in memory its methods do nothing."""

    def __init__(self, path: str) -> None:
        self._path, self._mark = path, path + ".mark"
        self._seen: tuple[int, int] | None = None  # inode and size after the last transaction
        self.is_cut = False

    def look(self) -> None:
        """Remember the log's state after a transaction."""
        self._seen = self._state()

    def refuse_cut(self, doing: str) -> None:
        """Raises LedgerError: the log shrank, or is another file. Neither happens while a run goes on."""
        state = self._state()
        if self._seen is None or (state and state[0] == self._seen[0] and state[1] >= self._seen[1]):
            return
        self.is_cut = state is not None
        raise LedgerError(
            f"ledger {self._path}: {doing}: its write-ahead log was cut or deleted while the run went on\n"
            "  Look for what changes files there, then `millrace train --resume`: it says whether a "
            "committed step is missing."
        )

    def committed(self, version: int) -> None:
        """Write the mark durably. Raises StorageError."""
        if self._path == MEMORY:
            return
        with writing(self._mark):
            is_new = not os.path.exists(self._mark)
            mark = os.open(self._mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(mark, _encode(version), 0)
                os.fdatasync(mark)
            finally:
                os.close(mark)
            if is_new:
                _sync_directory(os.path.dirname(self._mark))

    def refuse_rolled_back(self, version: int) -> None:
        """`version` is the ledger's last. Raises LedgerError: the mark names a later version, or is
        damaged."""
        marked = self._read_mark()
        if version < marked:
            raise LedgerError(
                f"ledger {self._path}: it holds {version} of {marked} committed steps: its write-ahead log "
                f"`{os.path.basename(self._path)}-wal` is damaged or missing\n"
                "  Restore both from one backup. To go on without the lost steps: `millrace train --resume "
                f"--from-version {version}`."
            )

    def folded(self, version: int) -> None:
        """Everything up to `version` is in the file. A mark of a later version stays, for the next
        opening."""
        with suppress(LedgerError, FileNotFoundError):
            if self._read_mark() <= version:
                os.unlink(self._mark)

    def _state(self) -> tuple[int, int] | None:
        if self._path == MEMORY:
            return None
        try:
            status = os.stat(self._path + "-wal")
        except OSError:
            return None
        return status.st_ino, status.st_size

    def _read_mark(self) -> int:
        """The marked version; 0: there is no mark."""
        try:
            with open(self._mark, "rb") as file:
                data = file.read()
            version = int(data[:20])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError):
            version = -1
        if version < 0 or data != _encode(version):
            raise LedgerError(
                f"{self._mark} is damaged: it names the newest committed step, so whether the ledger has all "
                "of them cannot be told\n  Restore it, or go on from what the ledger has: delete this file, "
                "then `millrace train --resume`."
            )
        return version


def _encode(version: int) -> bytes:
    text = b"%020d " % version
    return text + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
