"""A file that cannot be trusted is refused with the reason."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

import pytest
from ledger_records import make_group, ready_group

from millrace.controller import episode
from millrace.core.errors import LedgerError
from millrace.core.turns.turn_bounds import UNBOUNDED, EpisodeBounds, TurnBounds
from millrace.core.types import Finish, Sampling, State
from millrace.ledger import SqliteLedger, opening
from millrace.ledger.opening import ledger_failures
from millrace.ledger.reading import LedgerReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def make(path: Path, num_groups: int = 1) -> None:
    ledger = SqliteLedger(path, run={"seed": 7})
    ledger.admit([ready_group(i, num_tokens=50) for i in range(num_groups)])
    ledger.close()


def refused(path: Path, match: str) -> None:
    with pytest.raises(LedgerError, match=match) as error:
        SqliteLedger(path, run={})
    assert str(path) in str(error.value)


def test_a_run_keeps_what_it_was_created_with(path: Path) -> None:
    make(path)
    assert SqliteLedger(path, run={"seed": 8}).run == {"seed": 7}


def test_a_second_writer_is_refused_and_told_who_writes(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    refused(path, rf"in use by process {os.getpid()} on ")
    ledger.close()
    SqliteLedger(path, run={}).close()


def test_who_looks_whether_a_run_is_held_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    with open(f"{path}.lock") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr(os, "sched_yield", lambda: fcntl.flock(looks, fcntl.LOCK_UN))
        SqliteLedger(path, run={}).close()


def test_who_keeps_a_look_is_not_waited_for_long(path: Path) -> None:
    make(path)
    with open(f"{path}.lock") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        refused(path, "in use by ")


def test_an_empty_file_is_refused(path: Path) -> None:
    path.touch()
    refused(path, "the file is empty")


def test_a_text_file_is_not_a_ledger(path: Path) -> None:
    path.write_text("reward,step\n" * 100)
    refused(path, "This is not a ledger")


def test_another_database_is_not_a_ledger(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.close()
    refused(path, "an SQLite file, but not a ledger")


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "missing" / "ledger.sqlite", "its lock cannot be made")


@pytest.mark.parametrize(("found", "age"), [(0, "older"), (99, "newer")])
def test_a_file_of_another_format_is_refused(path: Path, found: int, age: str) -> None:
    make(path)
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {found}")
    db.close()
    refused(path, f"written in format {found} by an? {age} Millrace")


NO_DIGESTS = "DROP TABLE row_digests;"
LIVE_INDEX = "CREATE INDEX trajectories_live ON trajectories (state, group_id) WHERE state IN "


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        (5, f"{LIVE_INDEX} ('buffered', 'queued'); DELETE FROM counts WHERE name = 'waiting'; {NO_DIGESTS}"),
        (6, f"{LIVE_INDEX} ('buffered', 'queued', 'waiting'); {NO_DIGESTS}"),
        (7, NO_DIGESTS),
        (8, ""),
    ],
)
def test_a_file_of_an_older_format_goes_on_in_the_present_format(
    path: Path, found: int, changes: str
) -> None:
    """Format 5 knows no state `waiting`."""
    make(path)
    db = sqlite3.connect(path)
    db.executescript(f"{changes} PRAGMA user_version = {found};")
    db.close()
    reader = LedgerReader(path)  # a look changes nothing
    assert reader.overview().accounting.balanced
    reader.close()
    ledger = SqliteLedger(path, run={})
    ledger.admit([group := ready_group(1, num_tokens=5)])
    group.row_digest = "0123456789abcdef"
    member = group.members[0]
    member.state, member.finish, member.reward = State.WAITING, Finish.TURN, None
    ledger.update([member])
    assert ledger.flush().balanced
    ledger.close()
    ledger = SqliteLedger(path, run={})
    recovered = ledger.recover().groups
    assert [m.state for m in recovered[-1].members][:1] == [State.WAITING]
    assert [one.row_digest for one in recovered] == ["" if changes else "0f", "0123456789abcdef"]
    ledger.close()


def test_bounds_of_turns_that_were_metrics_go_on_as_bounds(path: Path) -> None:
    """Up to format 8 they were metrics by these names."""
    names = {f"first_turn:{name}": 1.0 for name in ("stop:\n\n", "stop_id:9")} | {
        "first_turn:max_tokens": 3.0
    }
    names |= {"next_turn:max_tokens": 2.0, "next_turn:stop:END": 1.0, "next_turn:stop_id:11": 1.0}
    names |= {"next_turn:stop_id:4": 1.0}
    bounds = EpisodeBounds(TurnBounds(3, ("\n\n",), (9,)), TurnBounds(2, ("END",), (4, 11)))
    ledger = SqliteLedger(path, run={})
    ledger.admit([group := make_group(0)])
    bounded, free = group.members
    bounded.metrics, free.metrics = {"turn_1": 0.5, **names}, {"turn_1": 0.25}
    ledger.close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 8")
    db.close()
    before = path.read_bytes()
    with LedgerReader(path) as reader:  # a look changes nothing
        shown = reader.trajectory(bounded.trajectory_id)
    assert path.read_bytes() == before
    ledger = SqliteLedger(path, run={})
    found = ledger.recover().groups[0].members
    assert [one.bounds for one in (shown, *found)] == [bounds, bounds, UNBOUNDED]
    assert [one.metrics for one in (shown, *found)] == [{"turn_1": 0.5}, {"turn_1": 0.5}, {"turn_1": 0.25}]
    lease = episode.work(found[0], group.prompt, Sampling(max_tokens=8), 0, 0)
    assert lease.sampling == Sampling(max_tokens=3, stop=("\n\n",), stop_token_ids=(9,))
    ledger.close()
    with LedgerReader(path) as reader:
        assert reader.trajectory(bounded.trajectory_id).bounds == bounds


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_truncated_file_is_refused(path: Path, kept: float) -> None:
    make(path, num_groups=200)
    os.truncate(path, int(path.stat().st_size * kept))
    refused(path, "damaged")


def test_a_file_with_a_broken_page_is_refused(path: Path) -> None:
    make(path, num_groups=200)
    with open(path, "r+b") as file:
        for page in range(3, path.stat().st_size // 4096, 4):
            file.seek(page * 4096)
            file.write(b"\xff" * 512)
    refused(path, "corrupt|malformed")


def test_a_creation_cut_short_leaves_nothing_in_the_way(path: Path) -> None:
    path.with_name(path.name + ".new").write_bytes(b"half of a file")
    make(path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["ledger.sqlite", "ledger.sqlite.lock"]


def test_closing_twice_is_fine(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.close()
    ledger.close()


def test_a_refused_file_is_not_left_locked(path: Path) -> None:
    path.touch()
    refused(path, "empty")
    path.unlink()
    make(path)


def test_a_reader_refuses_the_same_files(path: Path) -> None:
    for content, match in ((None, "no such file"), (b"", "empty"), (b"text " * 9, "This is not a ledger")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(LedgerError, match=match):
            LedgerReader(path)


def test_a_writer_that_stands_still_within_a_write_is_told_of(tmp_path: Path) -> None:
    error = sqlite3.OperationalError("locking protocol")
    error.sqlite_errorname = "SQLITE_PROTOCOL"  # type: ignore[misc]
    with pytest.raises(LedgerError, match="let it go on"), ledger_failures(str(tmp_path), "read"):
        raise error


def test_a_run_whose_log_was_cut_is_let_go_though_nobody_can_open_the_file_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([ready_group(0, num_tokens=50)])
    ledger.flush()
    os.truncate(f"{path}-wal", 0)
    ledger.admit([ready_group(1, num_tokens=50)])
    with pytest.raises(LedgerError, match="was cut or deleted"):
        ledger.flush()

    def unreadable(*_: object, **__: object) -> None:
        raise sqlite3.DatabaseError("file is not a database")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "_connect", unreadable)
        ledger.close()
    with open(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
