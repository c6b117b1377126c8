"""What a flush costs follows what changed, not how long the run is. Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ledger_records import grow, lease, make_group, ready_group, step_of

from millrace.ledger import SqliteLedger

BATCH = 4


def cost_of(ledger: SqliteLedger, action: Callable[[], object]) -> tuple[int, int, int]:
    """(SQL statements, rows changed, virtual machine instructions) of `action`."""
    statements, instructions, before = 0, 0, ledger._db.total_changes

    def statement(_: str) -> None:
        nonlocal statements
        statements += 1

    def instruction() -> int:
        nonlocal instructions
        instructions += 1
        return 0

    ledger._db.set_trace_callback(statement)
    ledger._db.set_progress_handler(instruction, 1)
    action()
    ledger._db.set_trace_callback(None)
    ledger._db.set_progress_handler(None, 1)
    return statements, ledger._db.total_changes - before, instructions


def costs_of_a_step(ledger: SqliteLedger, version: int) -> dict[str, tuple[int, int, int]]:
    groups = [make_group(version * 500 + i) for i in range(BATCH)]
    members = [member for group in groups for member in group.members]
    costs = {}
    ledger.admit(groups)
    costs["admit"] = cost_of(ledger, ledger.flush)
    for phase in ("lease", "progress"):
        for member in members:
            if phase == "lease":
                lease(member)
            grow(member, 8)
        ledger.update(members)
        costs[phase] = cost_of(ledger, ledger.flush)
    costs["step"] = cost_of(ledger, lambda: ledger.commit_step(step_of(version + 1, *groups)))
    return costs


def test_every_write_costs_the_same_late_in_a_run_as_early() -> None:
    ledger = SqliteLedger(":memory:", run={})
    early = costs_of_a_step(ledger, 0)
    for version in range(1, 11):
        groups = [ready_group(version * 500 + i) for i in range(500)]
        ledger.admit(groups)
        ledger.commit_step(step_of(version + 1, *groups))
    late = costs_of_a_step(ledger, 11)
    assert ledger.accounting().admitted > 10_000
    for action, (statements, rows, instructions) in early.items():
        assert late[action][:2] == (statements, rows)
        assert late[action][2] == pytest.approx(instructions, rel=0.01), action


def test_progress_alone_changes_one_row_a_trajectory() -> None:
    ledger = SqliteLedger(":memory:", run={})
    group = make_group(0)
    ledger.admit([group])
    for member in group.members:
        lease(member)
        grow(member, 8)
    ledger.update(group.members)
    ledger.flush()
    for member in group.members:
        grow(member, 8)
    ledger.update(group.members)
    assert cost_of(ledger, ledger.flush)[1] == len(group.members)


def test_a_flush_of_nothing_changes_nothing() -> None:
    ledger = SqliteLedger(":memory:", run={})
    ledger.admit([ready_group(0)])
    ledger.flush()
    assert cost_of(ledger, ledger.flush)[1] == 0


def test_memory_of_ended_trajectories_is_given_back() -> None:
    ledger = SqliteLedger(":memory:", run={})
    ledger.admit([ready_group(0), ready_group(1)])
    ledger.commit_step(step_of(1, make_group(0)))
    assert sorted(ledger._accounts.states) == [2, 3]
    assert sorted(ledger._buffer._rows) == [2, 3]
    assert sorted(ledger._buffer._tokens._marks) == [2, 3]
