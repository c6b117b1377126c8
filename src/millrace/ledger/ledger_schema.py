"""Tables of a ledger file, and the numbers that identify such a file.

Triggers keep `counts`, not the program. So if any statement deletes or changes a row, the next check of the
accounts shows the fault. Every other row has a `checksum` of its values. SQLite computes it with
`row_checksum` (checksums.py) whenever the row is written.
"""

from __future__ import annotations

import re

from millrace.core.types import LIVE, State

APPLICATION_ID = 0x4D4C5243  # "MLRC"
FORMAT = 9

ADMITTED = "admitted"  # the row of `counts` that only ever grows

LIVE_STATES = "(" + ", ".join(sorted(f"'{s.value}'" for s in LIVE)) + ")"

_COUNT_ROWS = ", ".join(f"('{name}', 0)" for name in [ADMITTED, *(s.value for s in State)])

_TEMPLATE = f"""
CREATE TABLE run (
    about TEXT NOT NULL,            -- JSON: what the caller says of the run (config digest, seed, ...)
    created_wall_s REAL NOT NULL,
    CHECKSUM
) STRICT;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY,   -- position in the data stream
    row_id TEXT NOT NULL,
    prompt BLOB NOT NULL,           -- squeezed token ids (codec.py)
    text TEXT NOT NULL,
    CHECKSUM
) STRICT;
CREATE TABLE row_digests (
    group_id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL,           -- of the columns of the row, which no later row may differ from
    CHECKSUM
) STRICT;
CREATE TABLE skipped (
    group_id INTEGER PRIMARY KEY,
    row_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    CHECKSUM
) STRICT;
CREATE TABLE trajectories (
    trajectory_id INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    replica TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    lease INTEGER NOT NULL,
    num_tokens INTEGER,             -- NULL while it may still grow
    finish TEXT,
    reward REAL,
    metrics BLOB NOT NULL,          -- msgpack
    trained_version INTEGER,
    CHECKSUM
) STRICT;
CREATE INDEX trajectories_group ON trajectories (group_id);
CREATE TABLE chunks (
    trajectory_id INTEGER NOT NULL,
    start INTEGER NOT NULL,         -- position of the first token
    num_tokens INTEGER NOT NULL,
    versions BLOB NOT NULL,         -- msgpack: [[version, count], ...]
    data BLOB NOT NULL,              -- token ids and log-probs, plain or squeezed (codec.py)
    CHECKSUM
) STRICT;
CREATE UNIQUE INDEX chunks_position ON chunks (trajectory_id, start);
CREATE TABLE steps (
    version INTEGER PRIMARY KEY,    -- after the step
    group_ids BLOB NOT NULL,        -- msgpack, in batch order
    trajectory_ids BLOB NOT NULL,   -- msgpack, in batch order
    metrics BLOB NOT NULL,          -- msgpack
    wall_s REAL NOT NULL,
    CHECKSUM
) STRICT;
CREATE TABLE checkpoints (
    version INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    save_s REAL NOT NULL,
    wall_s REAL NOT NULL,
    CHECKSUM
) STRICT;
CREATE TABLE published (
    version INTEGER NOT NULL,
    digest TEXT NOT NULL,           -- of its weights; several where a repeat was rounded otherwise
    arithmetic TEXT NOT NULL,       -- what decided how its steps were rounded
    CHECKSUM
) STRICT;
CREATE UNIQUE INDEX published_version ON published (version, digest);
CREATE TABLE evaluations (
    name TEXT NOT NULL,
    version INTEGER NOT NULL,       -- of the weights that were evaluated
    num_attempts INTEGER NOT NULL,  -- rows of evaluation_attempts
    metrics BLOB NOT NULL,          -- msgpack
    reason TEXT NOT NULL,           -- why it was skipped; empty: it was done
    took_s REAL NOT NULL,
    wall_s REAL NOT NULL,
    CHECKSUM
) STRICT;
CREATE UNIQUE INDEX evaluations_once ON evaluations (name, version);
CREATE TABLE evaluation_attempts (
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    row_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,       -- 0: the greedy one
    tokens BLOB NOT NULL,           -- squeezed token ids (codec.py)
    finish TEXT NOT NULL,
    reward REAL,                    -- NULL: there is none
    answer TEXT NOT NULL,
    reason TEXT NOT NULL,           -- why there is no reward
    CHECKSUM
) STRICT;
CREATE UNIQUE INDEX evaluation_attempts_once ON evaluation_attempts (name, version, prompt_index, attempt);
CREATE TABLE counts (name TEXT PRIMARY KEY, num INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO counts VALUES {_COUNT_ROWS};
CREATE TRIGGER trajectory_admitted AFTER INSERT ON trajectories BEGIN
    UPDATE counts SET num = num + 1 WHERE name = '{ADMITTED}';
    UPDATE counts SET num = num + 1 WHERE name = new.state;
END;
CREATE TRIGGER trajectory_moved AFTER UPDATE OF state ON trajectories WHEN old.state <> new.state BEGIN
    UPDATE counts SET num = num - 1 WHERE name = old.state;
    UPDATE counts SET num = num + 1 WHERE name = new.state;
END;
CREATE TRIGGER trajectory_lost AFTER DELETE ON trajectories BEGIN
    UPDATE counts SET num = num - 1 WHERE name = old.state;
END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
"""
"""CHECKSUM stands for the column with the checksum of the columns above it."""

_WITH_CHECKSUM = re.compile(r"^CREATE TABLE (\w+) \((.*?)CHECKSUM", re.MULTILINE | re.DOTALL)

_TYPES = {
    table: dict(re.findall(r"^ +(\w+) ([A-Z]+)", columns, re.MULTILINE))
    for table, columns in _WITH_CHECKSUM.findall(_TEMPLATE)
}

CHECKED = {table: tuple(types) for table, types in _TYPES.items()}
"""The columns that a row's checksum covers: all columns of the table."""


def computed(table: str) -> str:
    """SQL for the checksum of a row's present values. Texts count as bytes, because damaged texts may not be
    UTF-8."""
    columns = (f"CAST({name} AS BLOB)" if kind == "TEXT" else name for name, kind in _TYPES[table].items())
    return f"row_checksum({', '.join(columns)})"


def intact(table: str) -> str:
    """SQL that says whether a row is as it was written."""
    return f"checksum IS {computed(table)}"


def insert_into(table: str) -> str:
    """SQL that inserts a row, from the values of `CHECKED`."""
    values = ", ".join("?" for _ in CHECKED[table])
    return f"INSERT INTO {table} ({', '.join(CHECKED[table])}) VALUES ({values})"


def _with_checksum(create: re.Match[str]) -> str:
    column = f"checksum INTEGER NOT NULL AS ({computed(create[1])}) STORED"
    return create[0].replace("CHECKSUM", column)


TABLES = _WITH_CHECKSUM.sub(_with_checksum, _TEMPLATE)
