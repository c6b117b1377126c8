"""Looking at a run shows its newest flush and leaves no mark."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from ledger_records import grow, lease, make_group, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.core.types import Accounting, BadPrompt, CheckpointInfo, State
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def files(directory: Path) -> dict[str, tuple[str, int]]:
    return {p.name: (sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in directory.iterdir()}


def test_a_run_that_goes_on_can_be_read(path: Path) -> None:
    ledger = SqliteLedger(path, run={"seed": 7})
    with LedgerReader(path) as reader:
        assert reader.overview().accounting == Accounting()
        groups = [ready_group(0), ready_group(1, version=1)]
        ledger.admit(groups)
        ledger.skip([BadPrompt(2, "row-2", "too long")])
        ledger.commit_step(step_of(1, groups[0]))
        ledger.commit_checkpoint(CheckpointInfo(1, "/v1", 0.5))
        state = reader.overview()
    assert (state.about, state.version, state.num_tokens) == ({"seed": 7}, 1, 16)
    assert (state.num_groups, state.num_skipped) == (2, 1)
    assert state.accounting == Accounting(admitted=4, trained=2, in_flight=2)
    assert state.checkpoint == CheckpointInfo(1, "/v1", 0.5)
    assert state.states["buffered"] == 2


def test_reading_a_run_that_has_ended_changes_no_file(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([ready_group(0)])
    ledger.commit_step(step_of(1, make_group(0)))
    ledger.close()
    before = files(path.parent)
    with LedgerReader(path) as reader:
        assert reader.overview().version == 1
        assert reader.group(0).members[0].columns
    assert files(path.parent) == before


def test_a_step_a_trajectory_and_a_group_are_found_by_their_ids(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = ready_group(0)
    ledger.admit([group])
    ledger.commit_step(step_of(1, group))
    with LedgerReader(path) as reader:
        assert reader.step(1) == step_of(1, group)
        assert reader.steps() == [step_of(1, group)]
        trajectory = reader.trajectory(1)
        assert (trajectory.state, trajectory.trained_version) == (State.TRAINED, 1)
        assert trajectory.columns == group.members[1].columns
        assert reader.group(0).prompt == group.prompt


def test_what_is_not_there_is_said_with_what_is(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    ledger.admit([ready_group(3)])
    ledger.flush()
    with LedgerReader(path) as reader:
        with pytest.raises(LedgerError, match="there is no step 1; it holds none yet"):
            reader.step(1)
        with pytest.raises(LedgerError, match="there is no trajectory 9; it holds 6 to 7"):
            reader.trajectory(9)
        with pytest.raises(LedgerError, match="there is no group 0; it holds 3 to 3"):
            reader.group(0)


def test_lengths_include_what_still_grows(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    growing = make_group(1)
    lease(growing.members[0])
    grow(growing.members[0], 3)
    ledger.admit([ready_group(0, num_tokens=5), growing])
    ledger.flush()
    with LedgerReader(path) as reader:
        assert reader.lengths() == [5, 5, 3, 0]
        assert reader.lengths(State.BUFFERED) == [5, 5]


def test_staleness_is_counted_by_token_at_the_version_it_was_trained_from(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    groups = [ready_group(0, version=0, num_tokens=3), make_group(1)]
    for member in groups[1].members:
        lease(member)
        grow(member, 2, version=0)
        grow(member, 1, version=1)
        member.state = State.BUFFERED
    ledger.admit(groups)
    ledger.commit_step(step_of(1, groups[0]))
    ledger.commit_step(step_of(2, groups[1]))
    with LedgerReader(path) as reader:
        assert reader.staleness_histogram() == {0: 8, 1: 4}
        assert reader.staleness_histogram(2) == {0: 2, 1: 4}


def test_reasons_and_skipped_prompts_are_listed(path: Path) -> None:
    ledger = SqliteLedger(path, run={})
    group = ready_group(0)
    group.members[0].state, group.members[0].reason = State.FAILED, "reward timed out"
    ledger.admit([group])
    ledger.skip([BadPrompt(1, "row-1", "too long")])
    ledger.flush()
    with LedgerReader(path) as reader:
        assert reader.reasons() == {("buffered", ""): 1, ("failed", "reward timed out"): 1}
        assert [(s.group_id, s.row_id, s.reason) for s in reader.skipped()] == [(1, "row-1", "too long")]
