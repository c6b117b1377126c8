"""Opens a ledger file: creates it, verifies it, or says why neither is possible. SQLite's errors are told in
terms of a run: the fault, the file and the remedy. The write-ahead log is watched, because SQLite takes a
cut, damaged or deleted log for a shorter log.

The file `ledger.sqlite.mark` names the newest committed version. The mark is written durably after each
commit, and removed when a clean end has folded the log into the file. A ledger with fewer steps than its mark
says was rolled back.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any
from urllib.parse import quote

import msgspec
import xxhash

from millrace.core import files
from millrace.core.clock import wall
from millrace.core.errors import DataError, LedgerError, writing
from millrace.ledger import older_formats
from millrace.ledger.checksums import DamageError, checked, refuse_damage, register
from millrace.ledger.ledger_schema import APPLICATION_ID, FORMAT, TABLES, intact

MEMORY = ":memory:"
_BUSY_TIMEOUT_S = 2.0
_READ_ATTEMPTS = 100
_LOOK_BYTES_MAX = 2**30  # up to which a look at a run checks the file first: 1.6 s on one core
_CACHE_KIB = -32768  # 32 MiB (negative: KiB). With SQLite's 2 MiB, chunks to be deleted are read again
_WAL_PAGES_MAX = 16384  # 64 MiB: a safety valve; the ledger folds the log back at its own moments


def open_for_writing(path: str, run: Mapping[str, Any]) -> sqlite3.Connection:
    """A verified ledger. If there is none, it is created with `run`. The caller holds the run's lock."""
    if path == MEMORY:
        db = _connect(MEMORY)
        _create_tables(db, run)
        return db
    if not os.path.exists(path):
        _create_file(path, run)
    _refuse_odd(path)
    with ledger_failures(path, "open"):
        db = _connect(f"file:{quote(path)}?mode=rw")
    try:
        _verify(db, path)
        with reading(path, "check"):
            refuse_damage(db)
        with ledger_failures(path, "open"):
            older_formats.migrate(db)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES_MAX}")
            db.execute(f"PRAGMA cache_size = {_CACHE_KIB}")
    except LedgerError:
        db.close()
        raise
    return db


def open_for_reading(path: str, *, check: bool = True) -> sqlite3.Connection:
    """A verified ledger. This connection can change neither the ledger nor its log. `check` reads the whole
    file first, if the file has no more than 1 GiB.

    Without a write-ahead log nobody writes, and everything is in the file. With a log, its index is mapped
    read-only. So reading never disturbs a run, alive or dead.
    """
    if not os.path.exists(path):
        raise LedgerError(f"ledger {path}: there is no such file\n  Give the directory of a run.")
    _refuse_odd(path)
    mode = "readonly_shm=1" if os.path.exists(path + "-wal") else "immutable=1"
    with ledger_failures(path, "open for reading"):
        db = _connect(f"file:{quote(path)}?mode=ro&{mode}")
    try:
        with ledger_failures(path, "open for reading"):
            begin_reading(db)
        _verify(db, path)
        if check and os.path.getsize(path) <= _LOOK_BYTES_MAX:
            with reading(path, "check"):
                refuse_damage(db)
        db.rollback()
    except LedgerError:
        db.close()
        raise
    return db


@contextmanager
def keeping_the_log(path: str) -> Iterator[None]:
    """A connection that is closed inside does not fold the log into the file.

    The last connection to close folds the log page by page, and half a log makes half a change. So a reader
    stays open until the end: the reader is the last, and folds nothing."""
    with ExitStack() as stack:
        with suppress(sqlite3.Error):  # if nobody can open the file, nothing is folded
            reader = stack.enter_context(closing(_connect(f"file:{quote(path)}?mode=ro&readonly_shm=1")))
            reader.execute("PRAGMA user_version").fetchone()
        yield


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode of the file at `path`; None: there is no file."""
    if path == MEMORY:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def refuse_moved(path: str, opened: tuple[int, int] | None, doing: str) -> None:
    """Refuse a file that was moved or deleted while open: writes to that file would be lost."""
    present = identity(path)
    if present != opened:
        state = "is gone" if present is None else "is another file"
        raise LedgerError(
            f"ledger {path}: {doing}: what was opened there {state}: the run directory was moved, deleted or "
            "replaced while the run went on\n  What was committed before is in the moved directory: put it "
            "back, or name it with --run-dir, then `millrace train --resume`."
        )


def begin_reading(db: sqlite3.Connection) -> None:
    """Start a transaction that sees one flush. While the writer sets up the log's index, SQLite
    refuses readers for some microseconds. So a refusal is tried again."""
    for attempt in range(_READ_ATTEMPTS):
        try:
            db.execute("BEGIN")
            db.execute("PRAGMA user_version").fetchone()
            return
        except sqlite3.OperationalError as error:
            db.rollback()
            transient = error.sqlite_errorname.startswith("SQLITE_READONLY")
            if not transient or attempt == _READ_ATTEMPTS - 1:
                raise


def read_about(db: sqlite3.Connection) -> dict[str, Any]:
    """The description with which the run was created."""
    row = db.execute(f"SELECT about, {intact('run')} FROM run").fetchone()
    if row is None:
        raise DamageError("table run: its row is missing")
    about: dict[str, Any] = msgspec.json.decode(checked("run", row)[0])
    return about


def _connect(uri: str) -> sqlite3.Connection:
    db = sqlite3.connect(uri, uri=uri != MEMORY, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
    register(db)
    return db


def _create_file(path: str, run: Mapping[str, Any]) -> None:
    """Create a temporary file and rename it. So a ledger that exists is whole, and an empty ledger is
    damaged."""
    temporary = path + ".new"
    if os.path.exists(temporary):
        os.unlink(temporary)
    with ledger_failures(path, "create"), closing(_connect(f"file:{quote(temporary)}?mode=rwc")) as db:
        _create_tables(db, run)
    os.replace(temporary, path)


def _create_tables(db: sqlite3.Connection, run: Mapping[str, Any]) -> None:
    db.executescript(f"BEGIN; {TABLES} COMMIT;")
    about = msgspec.json.encode(dict(run)).decode()
    db.execute("INSERT INTO run (about, created_wall_s) VALUES (?, ?)", (about, wall()))


def _refuse_odd(path: str) -> None:
    """Checks names and sizes, and does not open the file. Closing it would drop the locks that SQLite holds
    on it for this process (POSIX)."""
    try:
        for name in (path, path + "-wal", path + "-shm"):
            files.refuse_irregular(name)
        size = os.path.getsize(path)
    except DataError as error:
        raise LedgerError(f"ledger {path}: {error}") from None
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot be read: {error}\n  Check its permissions.") from error
    if size == 0:
        raise LedgerError(f"ledger {path}: the file is empty (truncated)\n  {damaged_advice(path)}")


def _verify(db: sqlite3.Connection, path: str) -> None:
    with ledger_failures(path, "open"):
        application_id = db.execute("PRAGMA application_id").fetchone()[0]
        number = older_formats.number(db)
    if application_id != APPLICATION_ID:
        raise LedgerError(f"ledger {path}: this is an SQLite file, but not a ledger\n  {OTHER_PATH}")
    if number != FORMAT and number not in older_formats.CHANGES:
        age = "newer" if number > FORMAT else "older"
        raise LedgerError(
            f"ledger {path}: written in format {number} by {'a' if age == 'newer' else 'an'} {age} Millrace; "
            f"this one reads format {FORMAT}\n  Use the version that made the run, or start a new one."
        )


# ---------------------------------------------------------------- SQLite's errors


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


# ---------------------------------------------------------------- the write-ahead log


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
