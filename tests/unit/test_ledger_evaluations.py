"""Evaluations in the ledger: once, whole, and no part of the accounts of training."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from tests.unit.ledger_records import evaluation_of, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.core.types import EvaluationRecord
from millrace.ledger.reading import LedgerReader
from millrace.ledger.sqlite import SqliteLedger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two steps, and versions 0 to 2 evaluated."""
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    for version in (1, 2):
        group = ready_group(version, version - 1)
        ledger.admit([group])
        ledger.commit_step(step_of(version, group))
    for version in range(3):
        ledger.evaluated(*evaluation_of(version))
    ledger.close()
    return tmp_path / "ledger.sqlite"


def test_what_was_recorded_comes_back(path: Path) -> None:
    with LedgerReader(path) as reader:
        record, attempts = evaluation_of(1)
        assert reader.evaluations()[1] == record
        assert reader.attempts("held-out", 1) == attempts
        assert reader.overview().accounting.admitted == 4


def test_a_version_is_evaluated_once_under_a_name_and_only_when_it_is_committed(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    for version in (1, 3):
        with pytest.raises(LedgerError, match=f"of version {version} cannot be recorded after version 2"):
            ledger.evaluated(*evaluation_of(version))
    ledger.evaluated(EvaluationRecord("other", 1, reason="too busy"), [])
    ledger.close()


def test_evaluations_of_undone_versions_leave_the_record(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.rewind(1)
    assert [one.version for one in ledger.evaluations()] == [0, 1]
    ledger.close()


def test_a_lost_attempt_is_found_when_the_ledger_is_opened(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("DELETE FROM evaluation_attempts WHERE version = 2 AND attempt = 1")
    db.commit()
    db.close()
    with pytest.raises(LedgerError, match="evaluation held-out of version 2 has 1 of its 2 attempts"):
        SqliteLedger(path, run={})
