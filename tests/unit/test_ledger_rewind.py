"""Going back to an earlier version: what is undone ends, what is left goes on, the accounts close."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.ledger_records import grow, lease, make_group, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.core.types import CheckpointInfo, State
from millrace.ledger.sqlite import SqliteLedger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Versions 1 to 4 of a group each, checkpoints at 2 and 4, a live group of version 1 and one of 3."""
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    groups = [ready_group(i, version=i) for i in range(4)]
    old, young, growing = ready_group(4, version=1), ready_group(5, version=3), make_group(6)
    lease(growing.members[0])
    grow(growing.members[0], 3, version=4)
    ledger.admit([*groups, old, young, growing])
    for version, group in enumerate(groups, start=1):
        ledger.commit_step(step_of(version, group))
        if version % 2 == 0:
            (tmp_path / f"v{version}").mkdir()
            ledger.commit_checkpoint(CheckpointInfo(version, str(tmp_path / f"v{version}"), 0.1))
    ledger.close()
    return tmp_path / "ledger.sqlite"


def test_the_steps_after_the_version_are_undone_and_all_that_came_of_them_ends(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    assert ledger.rewind(2) == 8  # of two steps, of the live group of version 3, and of the growing one
    recovered, accounting = ledger.recover(), ledger.accounting()
    checkpoint = ledger.checkpoint()
    assert (recovered.version, ledger.steps_after(2), recovered.next_group_id) == (2, [], 7)
    assert checkpoint is not None and checkpoint.version == 2
    assert [group.group_id for group in recovered.groups] == [4]
    assert (accounting.trained, accounting.rejected, accounting.in_flight) == (4, 8, 2)
    assert accounting.balanced
    ledger.commit_step(step_of(3, recovered.groups[0]))
    ledger.close()
    again = SqliteLedger(path, run={})  # counts every row
    assert again.recover().version == 3
    again.close()


def test_a_version_between_checkpoints_is_reached_by_replay(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.rewind(3)
    recovered, (record,) = ledger.recover(), ledger.steps_after(2)
    members = [member for group_id in record.group_ids for member in ledger.group(group_id).members]
    ledger.close()
    assert record.version == 3 and all(member.state is State.TRAINED for member in members)
    assert [group.group_id for group in recovered.groups] == [4, 5]


def test_going_back_to_the_start_keeps_nothing_but_the_position_in_the_data(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.rewind(0)
    recovered, checkpoint = ledger.recover(), ledger.checkpoint()
    ledger.close()
    assert (recovered.version, recovered.groups, checkpoint) == (0, [], None)
    assert recovered.next_group_id == 7


@pytest.mark.parametrize("version", [-1, 5])
def test_a_version_that_never_was_is_refused_and_nothing_changes(path: Path, version: int) -> None:
    ledger = SqliteLedger(path, run={})
    with pytest.raises(LedgerError, match="it has versions 0 to 4"):
        ledger.rewind(version)
    assert ledger.recover().version == 4
    ledger.close()
