"""A damaged ledger is refused in words, or was not damaged in anything that it holds."""

from __future__ import annotations

import sqlite3

import pytest
from ledger_fuzz import fuzz, make_ledger, recovered
from ledger_records import make_group
from tests.long import long

from millrace.core.errors import LedgerError
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader


@long
def test_no_damage_of_the_file_is_taken_for_content(tmp_path):
    """By hand, for 10,000 mutations: `python tests/unit/ledger_fuzz.py 10000`."""
    outcomes, wrong = fuzz(tmp_path, 300, seed=11)
    assert not wrong
    assert set(outcomes) == {"read: equal", "read: refused", "recovered: equal", "recovered: refused"}


@pytest.mark.parametrize(
    ("table", "column", "value", "row"),
    [
        ("trajectories", "reward", "0.5", "trajectory_id 20"),
        ("trajectories", "trained_version", "3", "trajectory_id 20"),
        ("groups", "prompt", "x'7a'", "group_id 10"),
        ("chunks", "data", "x'7a'", "trajectory_id"),
        ("steps", "metrics", "x'80'", "version 1"),
        ("checkpoints", "path", "'elsewhere'", "version 4"),
        ("published", "digest", "'other'", "version 0"),
        ("evaluations", "version", "3", "name held-out"),
        ("evaluation_attempts", "reward", "0.5", "name held-out"),
        ("skipped", "reason", "'none'", "group_id 80"),
        ("run", "about", "'{}'", "rowid 1"),
    ],
)
def test_a_value_that_changed_is_named_by_table_and_row(tmp_path, table, column, value, row):
    path = tmp_path / "ledger.sqlite"
    make_ledger(path)
    db = sqlite3.connect(path)
    db.create_function("row_checksum", -1, lambda *_: 5, deterministic=True)  # not of the content
    db.execute(f"UPDATE {table} SET {column} = {value}")
    db.commit()
    db.close()
    match = f"ledger {path}: check: table {table}, {row}.*\n  The file is damaged. Restore it"
    with pytest.raises(LedgerError, match=match):
        SqliteLedger(path, run={})
    with pytest.raises(LedgerError, match=match):
        LedgerReader(path)


def test_a_row_that_is_damaged_while_the_run_goes_on_is_not_trained(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    ledger.admit([group])
    ledger.flush()
    db = sqlite3.connect(path, isolation_level=None)
    db.create_function("row_checksum", -1, lambda *_: 5, deterministic=True)
    db.execute("UPDATE trajectories SET epoch = 9 WHERE trajectory_id = 1")
    db.close()
    group.members[1].lease = 4
    ledger.update(group.members)
    with pytest.raises(LedgerError, match="1 of 1 trajectories are missing, ended or damaged"):
        ledger.flush()


def test_other_programs_can_read_every_column(tmp_path):
    make_ledger(tmp_path / "ledger.sqlite")
    recovered(tmp_path / "ledger.sqlite")
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    assert all(db.execute(f"SELECT * FROM {table}").fetchall() for table in tables)
    db.close()
