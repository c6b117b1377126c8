"""SQLite's errors in terms of a run: the fault, the file and the remedy."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from millrace.core.errors import LedgerError
from millrace.ledger.checksums import DamageError

OTHER_PATH = "Give the path of a run's ledger.sqlite, or another run directory for a new run."


@contextmanager
def ledger_failures(path: str, doing: str) -> Iterator[None]:
    """Turn SQLite's errors while `doing` something with the ledger at `path` into LedgerError."""
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(f"ledger {path}: {doing}: {error}\n  {_advice(error, path)}") from error
    except DamageError as error:
        raise LedgerError(f"ledger {path}: {doing}: {error}\n  {damaged_advice(path)}") from error


@contextmanager
def reading(path: str, doing: str) -> Iterator[None]:
    """As `ledger_failures`. A value that cannot be decoded counts as damage too."""
    try:
        with ledger_failures(path, doing):
            yield
    except (ValueError, TypeError, LookupError, msgspec.MsgspecError) as error:
        raise LedgerError(
            f"ledger {path}: {doing}: cannot be decoded: {error}\n  {damaged_advice(path)}"
        ) from error


def _advice(error: sqlite3.Error, path: str) -> str:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
        return (
            f"The disk is full or failing ({_free(path)} free): free some space, then "
            "`millrace train --resume`. Everything flushed before is intact."
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "Another program holds a lock inside the file: close it (`fuser` names it), then resume."
    if name == "SQLITE_INTERRUPT":
        return "The answer took longer than who asked would wait: ask for less, or ask again later."
    if name == "SQLITE_PROTOCOL":
        return "Its writer is stopped in the middle of a write: let it go on, or end it, then look again."
    if name.startswith("SQLITE_NOTADB"):
        return f"This is not a ledger, or its first page is damaged. {OTHER_PATH}"
    if name.startswith("SQLITE_CORRUPT") or "UTF-8" in str(error):
        return damaged_advice(path)
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return "The file or its directory is not writable: check its permissions and mount."
    if name.startswith("SQLITE_CANTOPEN"):
        return "The file cannot be opened: check that its directory exists and is accessible."
    return "This is not expected: please report it with the message above."


def damaged_advice(path: str) -> str:
    return (
        f"The file is damaged. Restore it from a backup together with `{os.path.basename(path)}-wal`, or "
        "start a new run directory from the newest checkpoint."
    )


def _free(path: str) -> str:
    try:
        stat = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return "unknown space"
    return f"{stat.f_bavail * stat.f_frsize / 2**20:.0f} MiB"
