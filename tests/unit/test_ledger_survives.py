"""What a resume needs beyond the live groups: where checkpoints lie, and which rows are banned."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.ledger_records import make_group, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.core.types import CheckpointInfo, State
from millrace.ledger.reading import LedgerReader
from millrace.ledger.sqlite import SqliteLedger


def test_a_moved_run_directory_keeps_its_checkpoints(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "checkpoints" / "v1").mkdir(parents=True)
    ledger = SqliteLedger(here / "ledger.sqlite", run={})
    group = ready_group(0)
    ledger.admit([group])
    ledger.commit_step(step_of(1, group))
    ledger.commit_checkpoint(CheckpointInfo(1, str(here / "checkpoints" / "v1"), 0.1))
    ledger.close()
    here.rename(there)
    with LedgerReader(there / "ledger.sqlite") as reader:
        shown = reader.overview().checkpoint
    moved = SqliteLedger(there / "ledger.sqlite", run={})
    recovered = moved.checkpoint()
    moved.close()
    assert recovered == shown == CheckpointInfo(1, str(there / "checkpoints" / "v1"), 0.1)


def test_a_checkpoint_elsewhere_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    ledger = SqliteLedger(tmp_path / "run" / "ledger.sqlite", run={})
    group = ready_group(0)
    ledger.admit([group])
    ledger.commit_step(step_of(1, group))
    ledger.commit_checkpoint(CheckpointInfo(1, str(tmp_path / "elsewhere"), 0.1))
    checkpoint = ledger.checkpoint()
    ledger.close()
    assert checkpoint is not None
    assert checkpoint.path == str(tmp_path / "elsewhere")


def test_a_row_that_killed_replicas_stays_quarantined(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    poison, other = make_group(0), make_group(1)
    ledger.admit([poison, other])
    for member in poison.members:
        member.state, member.reason = State.ABANDONED, "3 replicas died before its next token"
    for member in other.members:
        member.state, member.reason = State.FAILED, "the reward raised"
    ledger.update([*poison.members, *other.members])
    ledger.close()
    again = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    assert again.recover().quarantined == [poison.row_id]
    again.close()


@pytest.mark.parametrize("after", ["gone", "replaced"])
def test_a_run_directory_that_is_moved_while_it_is_open_ends_the_run(tmp_path, after):
    path = tmp_path / "run" / "ledger.sqlite"
    path.parent.mkdir()
    ledger = SqliteLedger(path, run={})
    path.parent.rename(tmp_path / "moved")
    if after == "replaced":
        path.parent.mkdir()
        SqliteLedger(path, run={}).close()
    with pytest.raises(LedgerError, match="was moved, deleted or replaced"):
        ledger.flush()
    ledger.close()
