"""From an older format of a ledger file to the present one. A look at an older file changes nothing.

Format 5 has no trajectory that waits for an environment. Format 6 has an index of live trajectories. Every
update of a row paid for that index, and only a resume used it. Format 7 has no digests of rows. Up to format
8 the bounds of a trajectory's turns are metrics of it, by the names that `bounds_apart` reads.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import msgspec

from millrace.core.turns.turn_bounds import EpisodeBounds, TurnBounds
from millrace.core.types import State
from millrace.ledger.codec import with_bounds
from millrace.ledger.ledger_schema import FORMAT, TABLES

_KINDS = "first_turn:", "next_turn:"


def _create(table: str) -> str:
    """SQL that creates one table, as `TABLES` does."""
    start = TABLES.index(f"CREATE TABLE {table} (")
    return TABLES[start : TABLES.index("STRICT;", start)] + "STRICT;"


CHANGES = {
    5: f"INSERT INTO counts VALUES ('{State.WAITING}', 0);",
    6: "DROP INDEX trajectories_live;",
    7: _create("row_digests"),
    8: "UPDATE trajectories SET metrics = bounds_apart(metrics)"
    " WHERE instr(metrics, CAST('_turn:' AS BLOB));",
}
"""By format: what makes the next format of it."""

_DIFFERENT = {
    5: {"trajectories_live", "row_digests"},
    6: {"trajectories_live", "row_digests"},
    7: {"row_digests"},
}


def number(db: sqlite3.Connection) -> int:
    """The format of a file."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def different(db: sqlite3.Connection) -> set[str]:
    """Tables and indexes that the file's format lacks, or that only an older format has."""
    return _DIFFERENT.get(number(db), set())


def present_metrics(db: sqlite3.Connection, blob: bytes) -> bytes:
    """The metrics of a trajectory in the present form."""
    return blob if number(db) == FORMAT else bounds_apart(blob)


def bounds_apart(blob: bytes) -> bytes:
    """From the metrics of a trajectory up to format 8."""
    metrics = msgspec.msgpack.decode(blob)
    bounds = EpisodeBounds(*(_bounds_among(metrics, kind) for kind in _KINDS))
    rest = {name: value for name, value in metrics.items() if not name.startswith(_KINDS)}
    return msgspec.msgpack.encode(with_bounds(rest, bounds))


def _bounds_among(metrics: Mapping[str, float], kind: str) -> TurnBounds:
    names = [name.removeprefix(kind) for name in metrics if name.startswith(kind)]
    stop = sorted(name.removeprefix("stop:") for name in names if name.startswith("stop:"))
    ids = sorted(int(name.removeprefix("stop_id:")) for name in names if name.startswith("stop_id:"))
    return TurnBounds(int(metrics.get(f"{kind}max_tokens", 0.0)), tuple(stop), tuple(ids))


def migrate(db: sqlite3.Connection) -> None:
    """Bring the file to the present format, each format in a transaction."""
    db.create_function("bounds_apart", 1, bounds_apart, deterministic=True)
    while (old := number(db)) != FORMAT:
        db.executescript(f"BEGIN; {CHANGES[old]} PRAGMA user_version = {old + 1}; COMMIT;")
