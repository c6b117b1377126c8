"""A lost or damaged write-ahead log is noticed: no committed step is rolled back without a word."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from ledger_records import make_group, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader

STEPS = 8


@pytest.fixture
def running(tmp_path: Path) -> SqliteLedger:
    """A ledger in `tmp_path`/run that has committed steps and is open."""
    (tmp_path / "run").mkdir()
    ledger = SqliteLedger(tmp_path / "run" / "ledger.sqlite", run={})
    for version in range(1, STEPS + 1):
        batch = ready_group(version)
        ledger.admit([batch])
        ledger.commit_step(step_of(version, batch))
    return ledger


def killed(tmp_path: Path) -> Path:
    """What lies on the disk, as if the process had been killed now."""
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    return tmp_path / "killed" / "ledger.sqlite"


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "deleted": lambda log: log.unlink(),
    "empty": lambda log: os.truncate(log, 0),
    "halved": lambda log: os.truncate(log, log.stat().st_size // 2),
    "flipped early": lambda log: flip(log, 0.1),
    "flipped late": lambda log: flip(log, 0.8),
}


def test_a_killed_run_has_every_committed_step(running, tmp_path):
    ledger = SqliteLedger(killed(tmp_path), run={})
    assert ledger.recover().version == STEPS
    ledger.close()


@pytest.mark.parametrize("damage", DAMAGE)
def test_steps_that_are_missing_are_named_and_refused(running, tmp_path, damage):
    path = killed(tmp_path)
    DAMAGE[damage](log_of(path))
    ledger = SqliteLedger(path, run={})
    with pytest.raises(LedgerError, match=rf"holds \d of {STEPS} committed steps.*\n.*--from-version \d"):
        ledger.recover()
    ledger.close()


def test_going_back_is_the_way_on(running, tmp_path):
    path = killed(tmp_path)
    log_of(path).unlink()
    ledger = SqliteLedger(path, run={})
    ledger.rewind(0)
    assert ledger.recover().version == 0
    ledger.close()
    again = SqliteLedger(path, run={})
    assert again.recover().version == 0
    again.close()


def test_a_refusal_is_repeated(running, tmp_path):
    path = killed(tmp_path)
    log_of(path).unlink()
    for _ in range(2):
        ledger = SqliteLedger(path, run={})
        with pytest.raises(LedgerError, match="committed steps"):
            ledger.recover()
        ledger.close()


def test_a_damaged_mark_is_refused(running, tmp_path):
    path = killed(tmp_path)
    flip(path.with_name("ledger.sqlite.mark"), 0.5)
    ledger = SqliteLedger(path, run={})
    with pytest.raises(LedgerError, match=r"ledger.sqlite.mark.*damaged"):
        ledger.recover()
    ledger.close()


def test_a_clean_end_leaves_the_ledger_alone(running, tmp_path):
    running.close()
    found = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert found == ["ledger.sqlite", "ledger.sqlite.lock"]


@pytest.mark.parametrize("damage", ["deleted", "halved", "empty"])
def test_a_log_that_is_lost_while_the_run_goes_on_ends_it_at_the_next_commit(running, tmp_path, damage):
    path = tmp_path / "run" / "ledger.sqlite"
    DAMAGE[damage](log_of(path))
    running.admit([make_group(20)])
    with pytest.raises(LedgerError, match="write-ahead log was cut or deleted while the run went on"):
        running.flush()
    running.close()
    ledger = SqliteLedger(path, run={})
    if damage == "deleted":  # its bytes were still there for the process that had it open
        assert ledger.recover().version == STEPS
    else:
        with pytest.raises(LedgerError, match=rf"of {STEPS} committed steps"):
            ledger.recover()
    ledger.close()


def test_a_file_that_is_damaged_while_the_run_goes_on_is_no_clean_end(running, tmp_path):
    path = tmp_path / "run" / "ledger.sqlite"
    running._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    (page,) = running._db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'skipped'").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)  # nothing was written there, so it is in no cache
        file.write(b"\xff" * 4096)
    running._log.look()  # the log is shorter by our own doing
    with pytest.raises(LedgerError, match="damaged"):
        running.close()
    with pytest.raises(LedgerError):
        LedgerReader(path)
