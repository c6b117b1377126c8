"""One writer per run. The operating system drops the lock when the process ends in any way.

`filelock` would replace two calls of `flock`. It has no shared lock for readers, and names no holder.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

import msgspec

from millrace.core.clock import wall
from millrace.core.errors import LedgerError

_LOOKS_MAX = 20_000
"""Attempts to take the lock while a reader has a shared lock, for at least some 50 ms."""


class _Holder(msgspec.Struct):
    pid: int
    host: str
    since_wall_s: float


class RunLock:
    """An exclusive lock beside the ledger. The file stays after the lock is released.

    Raises:
        LedgerError: another process has the lock (named by pid and host), or the file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._path = path + ".lock"
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LedgerError(
                f"ledger {path}: its lock cannot be made: {error}\n"
                "  Check that the run directory exists and is writable."
            ) from error
        try:
            self._take()
        except OSError as error:
            holder = self._holder()
            os.close(self._fd)
            raise LedgerError(
                f"ledger {path}: in use by {holder}\n"
                "  Only one process may run it: stop that one first, or use another run directory."
            ) from error
        self._sign()

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> None:
        """Take the lock. A reader that checks the lock has a shared lock for a moment, so this method waits
        that long."""
        for _ in range(_LOOKS_MAX):
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused at once if a run has the lock
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.sched_yield()
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sign(self) -> None:
        me = _Holder(os.getpid(), os.uname().nodename, wall())
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, msgspec.json.encode(me), 0)

    def _holder(self) -> str:
        try:
            holder = msgspec.json.decode(os.pread(self._fd, 4096, 0), type=_Holder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "another process"
        return f"process {holder.pid} on {holder.host} for {wall() - holder.since_wall_s:.0f} s"
