"""Finds damage to a ledger file: in rows, in tables, and in the structures of SQLite.

SQLite does not notice a changed value, nor does `integrity_check` if the row stays well-formed. So each row
has a checksum. A file counts as whole if its structure is right, its tables are those of this program, every
row has its checksum and no step is missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
import xxhash

from millrace.ledger import older_formats
from millrace.ledger.ledger_schema import CHECKED, TABLES, computed, intact

_KEYS = {table: columns[0] for table, columns in CHECKED.items()} | {"run": "rowid"}
_PROBLEMS_MAX = 3
_encode, _digest = msgspec.msgpack.Encoder().encode, xxhash.xxh3_64_intdigest


class DamageError(Exception):
    """Names the damage. `failures.reading` adds the file and the remedy."""


def row_checksum(*values: Any) -> int:
    """XXH3 of the values with their types, as a positive SQLite integer."""
    return _digest(_encode(values)) >> 1


def register(db: sqlite3.Connection) -> None:
    """Give the connection the function `row_checksum`, without which it cannot write."""
    db.create_function("row_checksum", -1, row_checksum, deterministic=True)


def refuse_damage(db: sqlite3.Connection) -> None:
    """Check everything in the file. Raises DamageError, sqlite3.Error."""
    problems = [row[0] for row in db.execute(f"PRAGMA integrity_check({_PROBLEMS_MAX})")]
    if problems != ["ok"]:
        raise DamageError(f"corrupt: {'; '.join(problems)}")
    _refuse_other_tables(db)
    different = older_formats.different(db)
    for table in CHECKED:
        if table not in different:
            _refuse_damaged_rows(db, table)
    num, newest = db.execute("SELECT count(*), ifnull(max(version), 0) FROM steps").fetchone()
    if num != newest:
        raise DamageError(f"table steps: {num} rows for {newest} steps")


def checked(table: str, row: Sequence[Any]) -> Sequence[Any]:
    """A row without its last column, which is `intact(table)`. Raises DamageError."""
    if not row[-1]:
        raise DamageError(f"table {table}, {_KEYS[table]} {row[0]}: its checksum is not that of its content")
    return row[:-1]


def _refuse_damaged_rows(db: sqlite3.Connection, table: str) -> None:
    query = f"SELECT {_KEYS[table]}, checksum, {computed(table)} FROM {table} NOT INDEXED"
    row = db.execute(f"{query} WHERE NOT ({intact(table)}) LIMIT 1").fetchone()
    if row is not None:
        raise DamageError(f"table {table}, {_KEYS[table]} {row[0]}: checksum {row[1]}, content {row[2]}")


def _refuse_other_tables(db: sqlite3.Connection) -> None:
    """Compare the text of tables and triggers, which decides the effect of later statements."""
    with closing(sqlite3.connect(":memory:")) as fresh:
        register(fresh)
        fresh.executescript(TABLES)
        query = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
        expected, actual = fresh.execute(query).fetchall(), db.execute(query).fetchall()
    wrong = {row[1] for row in {*expected} ^ {*actual}} - older_formats.different(db)
    if wrong:
        raise DamageError(f"its tables are not a ledger's: {', '.join(sorted(map(repr, wrong)))}")
