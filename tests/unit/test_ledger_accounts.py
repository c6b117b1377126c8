"""Nothing is lost or counted twice without being noticed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from ledger_records import grow, lease, make_group, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.core.types import Accounting, State
from millrace.ledger import SqliteLedger, opening
from millrace.ledger.checksums import register


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def tamper(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    register(db)
    for statement in statements:
        db.execute(statement)
    db.close()


def test_every_state_is_counted() -> None:
    ledger = SqliteLedger(":memory:", run={})
    groups = [ready_group(i) for i in range(3)]
    ledger.admit(groups)
    ledger.commit_step(step_of(1, groups[0]))
    for member, state in zip(
        [*groups[1].members, *groups[2].members],
        [State.REJECTED, State.STALE, State.ABANDONED, State.FAILED],
        strict=True,
    ):
        member.state = state
    ledger.update([*groups[1].members, *groups[2].members])
    assert ledger.flush() == Accounting(6, trained=2, rejected=1, stale=1, abandoned=1, failed=1)


def test_accounting_includes_what_is_not_flushed() -> None:
    ledger = SqliteLedger(":memory:", run={})
    ledger.admit([make_group(0)])
    assert ledger.accounting() == Accounting(admitted=2, in_flight=2)


def test_a_row_lost_from_the_file_is_noticed_by_the_next_flush(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([make_group(0)])
    ledger.flush()
    tamper(path, "DELETE FROM trajectories WHERE trajectory_id = 1")
    ledger.admit([make_group(1)])
    with pytest.raises(LedgerError, match=r"accounts do not close: queued is 3, not 4"):
        ledger.flush()


def test_a_row_moved_by_another_program_is_noticed_by_the_next_flush(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([make_group(0)])
    ledger.flush()
    tamper(path, "UPDATE trajectories SET state = 'trained' WHERE trajectory_id = 1")
    with pytest.raises(LedgerError, match="trained is 1, not 0"):
        ledger.flush()


def test_an_update_that_hits_no_row_is_noticed(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    ledger.admit([group])
    ledger.flush()
    tamper(path, "DROP TRIGGER trajectory_lost", "DELETE FROM trajectories WHERE trajectory_id = 1")
    lease(group.members[1])
    ledger.update(group.members)
    with pytest.raises(LedgerError, match="1 of 1 trajectories are missing"):
        ledger.flush()


def test_a_row_lost_while_nobody_looked_is_noticed_on_opening(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([make_group(0)])
    ledger.close()
    find = "SELECT sql FROM sqlite_schema WHERE name = 'trajectory_lost'"
    (trigger,) = sqlite3.connect(path).execute(find).fetchone()
    delete = "DELETE FROM trajectories WHERE trajectory_id = 1"
    tamper(path, "DROP TRIGGER trajectory_lost", delete, trigger)
    with pytest.raises(LedgerError, match=r"accounts do not close: admitted is 1, not 2"):
        SqliteLedger(path, run={})


def test_lost_tokens_are_noticed_on_recovery(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([ready_group(0, num_tokens=4)])
    ledger.close()
    tamper(path, "DELETE FROM chunks WHERE trajectory_id = 1")
    with pytest.raises(LedgerError, match="trajectory 1 has 0 of its 4 tokens"):
        SqliteLedger(path, run={}).recover()


def test_a_failed_flush_keeps_everything_for_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_BUSY_TIMEOUT_S", 0.0)
    ledger = SqliteLedger(path, run={})
    group = make_group(0)
    ledger.admit([group])
    ledger.flush()
    lease(group.members[0])
    grow(group.members[0], 4)
    ledger.update(group.members)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="database is locked"):
        ledger.flush()
    other.close()
    ledger.flush()
    ledger.close()
    found = SqliteLedger(path, run={}).recover().groups[0].members[0]
    assert (found.lease, found.columns) == (1, group.members[0].columns)


def test_a_group_or_trajectory_cannot_be_admitted_twice() -> None:
    ledger = SqliteLedger(":memory:", run={})
    ledger.admit([make_group(0)])
    with pytest.raises(LedgerError, match="group 0 is admitted twice"):
        ledger.admit([make_group(0)])
    ledger.flush()
    with pytest.raises(LedgerError, match="trajectory 0 is admitted twice"):
        ledger.admit([make_group(0)])


def test_an_unknown_trajectory_cannot_be_updated() -> None:
    ledger = SqliteLedger(":memory:", run={})
    with pytest.raises(LedgerError, match="trajectory 0 is not known"):
        ledger.update(make_group(0).members)


def test_what_has_ended_cannot_move_again() -> None:
    ledger = SqliteLedger(":memory:", run={})
    group = make_group(0)
    ledger.admit([group])
    group.members[0].state = State.REJECTED
    ledger.update(group.members)
    group.members[0].state = State.QUEUED
    with pytest.raises(LedgerError, match="ended as rejected and cannot become queued"):
        ledger.update(group.members)
    group.members[0].state = State.REJECTED
    ledger.flush()
    ledger.update(group.members)  # the same end, told again, changes nothing
    group.members[0].state = State.STALE
    with pytest.raises(LedgerError, match="ended as rejected and cannot become stale"):
        ledger.update(group.members)
