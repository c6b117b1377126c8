"""Judgements that a run has paid for, in a file of its directory. A resumed run asks none of them again."""

from __future__ import annotations

import json
import sqlite3
from hashlib import blake2b
from pathlib import Path
from typing import Any

from millrace.core.errors import StorageError, boundary

FILE = "judgements.sqlite"
BUSY_S = 5.0
"""Longest wait for another reward worker's write."""


class Judgements:
    """Judgements by the digest of their question. All reward workers of a run share the file.

    `directory` None, or not on this host: nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None or not directory.is_dir() else directory / FILE
        if self._file is None:
            return
        with self._storing():
            # A worker is made in one thread, and its loop, which alone asks, runs in another.
            self._database = sqlite3.connect(
                self._file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, value REAL NOT NULL) "
                "WITHOUT ROWID"
            )

    def find(self, key: str) -> float | None:
        """Raises: StorageError: the file cannot be read."""
        if self._file is None:
            return None
        with self._storing():
            row = self._database.execute("SELECT value FROM judgements WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def keep(self, key: str, value: float) -> None:
        """Raises: StorageError: the file cannot be written."""
        if self._file is not None:
            with self._storing():
                self._database.execute("INSERT OR IGNORE INTO judgements VALUES (?, ?)", (key, value))

    def _storing(self) -> Any:
        return boundary(FILE, "judgements of the run cannot be kept", StorageError)


def key_of(body: dict[str, Any], asking: int) -> str:
    """The digest of a request, which has model, rubric, prompt and completion. `asking`: which of several
    times the same is asked."""
    canonical = json.dumps([body, asking], sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=16).hexdigest()
