"""Damage to a ledger file: found row by row, table by table, or in what SQLite keeps for itself.

SQLite sees no change of a value, and its `integrity_check` no change of a row that stays well-formed. So each
row has a checksum, and a file is taken for whole if its structure is sound, its tables are those of this
program, every row has its checksum and no step is missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from millrace.ledger.schema import CHECKED, TABLES, computed, intact

_KEYS = {
    "run": "rowid",
    "groups": "group_id",
    "skipped": "group_id",
    "trajectories": "trajectory_id",
    "chunks": "trajectory_id",
    "steps": "version",
    "checkpoints": "version",
    "published": "version",
    "evaluations": "name",
    "evaluation_attempts": "name",
}
_PROBLEMS_MAX = 3


class DamageError(Exception):
    """What is damaged; `failures.reading` adds the file and what to do."""


def row_checksum(*values: Any) -> int:
    """XXH3 of the values with their types, as a positive SQLite integer."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(values)) >> 1


def register(db: sqlite3.Connection) -> None:
    """Without it a connection can read the tables, and not write them."""
    db.create_function("row_checksum", -1, row_checksum, deterministic=True)


def refuse_damage(db: sqlite3.Connection) -> None:
    """Look at everything in the file. Raises DamageError, sqlite3.Error."""
    problems = [row[0] for row in db.execute(f"PRAGMA integrity_check({_PROBLEMS_MAX})")]
    if problems != ["ok"]:
        raise DamageError(f"corrupt: {'; '.join(problems)}")
    _refuse_other_tables(db)
    for table in CHECKED:
        _refuse_damaged_rows(db, table)
    num, newest = db.execute("SELECT count(*), ifnull(max(version), 0) FROM steps").fetchone()
    if num != newest:
        raise DamageError(f"table steps: {num} rows for {newest} steps")


def checked(table: str, row: Sequence[Any]) -> Sequence[Any]:
    """A row that was selected with `intact(table)` last, without that. Raises DamageError."""
    if not row[-1]:
        raise DamageError(f"table {table}, {_KEYS[table]} {row[0]}: its checksum is not that of its content")
    return row[:-1]


def _refuse_damaged_rows(db: sqlite3.Connection, table: str) -> None:
    query = f"SELECT {_KEYS[table]}, checksum, {computed(table)} FROM {table} NOT INDEXED"
    row = db.execute(f"{query} WHERE NOT ({intact(table)}) LIMIT 1").fetchone()
    if row is not None:
        raise DamageError(f"table {table}, {_KEYS[table]} {row[0]}: checksum {row[1]}, content {row[2]}")


def _refuse_other_tables(db: sqlite3.Connection) -> None:
    """The text of a trigger or table decides what later statements do."""
    fresh = sqlite3.connect(":memory:")
    try:
        register(fresh)
        fresh.executescript(TABLES)
        query = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
        due, found = fresh.execute(query).fetchall(), db.execute(query).fetchall()
    finally:
        fresh.close()
    wrong = {row[1] for row in {*due} ^ {*found}}
    if wrong:
        raise DamageError(f"its tables are not a ledger's: {', '.join(sorted(map(repr, wrong)))}")
