"""Exactly once: a trajectory is trained by one step of a lineage, or by none."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_records import make_group, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.core.types import CheckpointInfo, State, StepRecord
from millrace.ledger import SqliteLedger


@pytest.fixture
def ledger() -> SqliteLedger:
    ledger = SqliteLedger(":memory:", run={})
    ledger.admit([ready_group(0), ready_group(1)])
    return ledger


def test_a_trajectory_cannot_be_trained_by_two_steps(ledger: SqliteLedger) -> None:
    ledger.commit_step(step_of(1, make_group(0)))
    with pytest.raises(LedgerError, match="step 2 cannot train trajectory 0: it ended as trained in step 1"):
        ledger.commit_step(step_of(2, make_group(0)))
    assert ledger.accounting().trained == 2


def test_a_trajectory_cannot_be_trained_twice_by_one_step(ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerError, match="trajectory 0: it is named twice"):
        ledger.commit_step(StepRecord(1, [0], [0, 1, 0], {}))


def test_a_trajectory_trained_before_a_restart_of_the_program_cannot_be_trained_again(tmp_path: Path) -> None:
    first = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    first.admit([ready_group(0)])
    first.commit_step(step_of(1, make_group(0)))
    first.close()
    second = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    second.recover()
    with pytest.raises(LedgerError, match="ended as trained in step 1"):
        second.commit_step(step_of(2, make_group(0)))


def test_what_was_never_admitted_cannot_be_trained(ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerError, match="trajectory 14: it is not known"):
        ledger.commit_step(step_of(1, make_group(7)))


def test_what_was_rejected_cannot_be_trained(ledger: SqliteLedger) -> None:
    rejected = ready_group(2)
    rejected.members[0].state = State.REJECTED
    ledger.admit([rejected])
    with pytest.raises(LedgerError, match="trajectory 4: it ended as rejected"):
        ledger.commit_step(step_of(1, rejected))
    ledger.flush()
    with pytest.raises(LedgerError, match="trajectory 4: it ended as rejected"):
        ledger.commit_step(step_of(1, rejected))


def test_a_refused_step_leaves_no_trace(ledger: SqliteLedger) -> None:
    before = ledger.flush()
    with pytest.raises(LedgerError):
        ledger.commit_step(step_of(1, make_group(0), make_group(7)))
    assert ledger.flush() == before
    ledger.commit_step(step_of(1, make_group(0)))


def test_steps_follow_each_other_and_none_is_committed_twice(ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerError, match="step 2 does not follow step 0"):
        ledger.commit_step(step_of(2, make_group(0)))
    ledger.commit_step(step_of(1, make_group(0)))
    with pytest.raises(LedgerError, match="step 1 does not follow step 1"):
        ledger.commit_step(step_of(1, make_group(1)))


def test_only_a_step_trains(ledger: SqliteLedger) -> None:
    group = ready_group(2)
    ledger.admit([group])
    for member in group.members:
        member.state = State.TRAINED
    with pytest.raises(LedgerError, match="trajectory 4 says it is trained, but no step has it"):
        ledger.flush()
    ledger.commit_step(step_of(1, group))
    assert ledger.flush().trained == 2


def test_a_step_takes_everything_buffered_with_it(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    ledger.admit([ready_group(0), make_group(1)])
    ledger.commit_step(step_of(1, make_group(0)))
    ledger._failed = True  # close without a flush
    ledger.close()
    recovered = SqliteLedger(tmp_path / "ledger.sqlite", run={}).recover()
    assert [group.group_id for group in recovered.groups] == [1]


def test_a_checkpoint_covers_only_committed_steps(ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerError, match="checkpoint 1 covers steps after 0"):
        ledger.commit_checkpoint(CheckpointInfo(1, "/v1", 0.1))


def test_metrics_that_cannot_be_recorded_are_named(ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerError, match="cannot record"):
        ledger.commit_step(StepRecord(1, [0], [0, 1], {"loss": object()}))


def test_the_highest_group_ever_trained_is_known_after_a_restart_of_the_program(tmp_path: Path) -> None:
    """And not that of the last batch alone: a batch may catch up groups that earlier batches skipped."""
    first = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    assert first.recover().reached == -1
    first.admit([ready_group(number) for number in range(4)])
    for version, group_id in enumerate((0, 3, 1), start=1):
        first.commit_step(step_of(version, make_group(group_id)))
    first.close()
    assert SqliteLedger(tmp_path / "ledger.sqlite", run={}).recover().reached == 3
