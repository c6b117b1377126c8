"""From an older format of a ledger file to the present one. A look at an older file changes nothing.

Format 5 has no trajectory that waits for an environment. Format 6 has an index of live trajectories. Every
update of a row paid for that index, and only a resume used it. Format 7 has no digests of rows.
"""

from __future__ import annotations

import sqlite3

from millrace.core.types import State
from millrace.ledger.ledger_schema import FORMAT, TABLES


def _create(table: str) -> str:
    """SQL that creates one table, as `TABLES` does."""
    start = TABLES.index(f"CREATE TABLE {table} (")
    return TABLES[start : TABLES.index("STRICT;", start)] + "STRICT;"


CHANGES = {
    5: f"INSERT INTO counts VALUES ('{State.WAITING}', 0);",
    6: "DROP INDEX trajectories_live;",
    7: _create("row_digests"),
}
"""By format: what makes the next format of it."""

DIFFERENT = {"trajectories_live", "row_digests"}
"""Tables and indexes that older formats lack, or that only they have."""


def number(db: sqlite3.Connection) -> int:
    """The format of a file."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection) -> None:
    """Bring the file to the present format, each format in a transaction."""
    while (old := number(db)) != FORMAT:
        db.executescript(f"BEGIN; {CHANGES[old]} PRAGMA user_version = {old + 1}; COMMIT;")
