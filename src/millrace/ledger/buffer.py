"""The changes since the last flush, kept by reference, and their rows.

Of the trajectories that only grew, a flush writes `GROWING_MIN`, those that have waited longest. So thousands
of trajectories that report every second are written every few seconds, in larger chunks. A few are written at
once. Of very many, a flush writes one in `GROWING_FLUSHES`, so that a killed controller loses a bounded time.
Where flushes follow each other quickly, because turns go on, each writes at most one for `GROWN_MIN` reports.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from itertools import islice
from typing import Any, NamedTuple

from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import LedgerError
from millrace.core.types import TERMINAL, BadPrompt, Group, State, StepRecord, Trajectory, VersionRecord
from millrace.ledger import records
from millrace.ledger.accounts import Accounts
from millrace.ledger.ledger_schema import LIVE_STATES, intact
from millrace.ledger.records import ChunkRow, chunk_row, is_final

GROWING_MIN = 512
GROWN_MIN = 4
GROWING_FLUSHES = 40  # 20 s; half as many would cost a tenth of a core more at 3.2 million tokens/s

_TRAIN = (
    f"UPDATE trajectories SET state = '{State.TRAINED}', trained_version = ?"
    f" WHERE trajectory_id = ? AND state IN {LIVE_STATES} AND {intact('trajectories')}"
)


class Buffer:
    """Unwritten changes and the accounts that already contain them.

    `_dirty` has trajectories that changed in more than their tokens, `_growing` those that only grew. The
    buffer keeps references, and reads the trajectories when it writes them. `write_step` alone writes
    TRAINED. Before that, a trajectory counts, and is written, in its previous state.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self._tokens = TokenLog()
        self._groups: dict[int, Group] = {}
        self._skips: list[BadPrompt] = []
        self.published: list[VersionRecord] = []
        self._dirty: dict[int, Trajectory] = {}
        self._growing: dict[int, Trajectory] = {}  # since the last chunk of each, the oldest first
        self._num_grown = 0  # since the last flush
        self._rows: dict[int, tuple[Any, ...]] = {}  # of live trajectories, as in the file
        self._planned: dict[int, tuple[Any, ...]] = {}

    def admit(self, group: Group) -> None:
        if group.group_id in self._groups:
            raise LedgerError(f"group {group.group_id} is admitted twice\n  Ids must never be reused.")
        for member in group.members:
            self.accounts.admit(member.trajectory_id, member.state)
            self._dirty[member.trajectory_id] = member
        self._groups[group.group_id] = group

    def adopt(self, trajectory: Trajectory, recorded: State) -> None:
        """Take a trajectory that was read from the file with the state `recorded`. A difference will be
        written."""
        self.accounts.states[trajectory.trajectory_id] = recorded
        self._tokens.recorded(trajectory)
        self._rows[trajectory.trajectory_id] = ()
        if recorded is not trajectory.state:
            self.update(trajectory)

    def skip(self, prompts: Sequence[BadPrompt]) -> None:
        self._skips += prompts

    def update(self, trajectory: Trajectory) -> None:
        self._look_at(trajectory)
        self._dirty[trajectory.trajectory_id] = trajectory

    def grow(self, trajectories: Sequence[Trajectory]) -> None:
        self._growing |= {trajectory.trajectory_id: trajectory for trajectory in trajectories}
        self._num_grown += len(trajectories)

    def look_again(self, trained: Iterable[int]) -> None:
        """Bring the accounts up to the present states, before writing.

        Raises LedgerError: a trajectory says it is trained, and is not among the `trained`.
        """
        due = set(trained)
        for trajectory_id, trajectory in self._dirty.items():
            self._look_at(trajectory)
            if trajectory.state is State.TRAINED and trajectory_id not in due:
                raise LedgerError(
                    f"trajectory {trajectory_id} says it is trained, but no step has it\n"
                    "  Only commit_step trains."
                )

    def write(self, db: sqlite3.Connection, *, everything: bool) -> None:
        """Write inside a transaction. The buffer changes only in `written`, after the commit."""
        db.executemany(records.INSERT_GROUP, [records.group_row(g) for g in self._groups.values()])
        digests = [(g.group_id, g.row_digest) for g in self._groups.values() if g.row_digest]
        db.executemany(records.INSERT_ROW_DIGEST, digests)
        db.executemany(records.INSERT_SKIPPED, [(p.group_id, p.row_id, p.reason) for p in self._skips])
        db.executemany(records.INSERT_PUBLISHED, [astuple(p) for p in self.published])
        self._planned = {
            i: records.trajectory_row(t, self.accounts.states[i]) for i, t in self._dirty.items()
        }
        new, changed = [], []
        for trajectory_id, row in self._planned.items():
            before = self._rows.get(trajectory_id)
            if before is None:
                new.append((*row, self._dirty[trajectory_id].group_id))
            elif row != before:
                changed.append(row)
        db.executemany(records.INSERT_TRAJECTORY, new)
        _change_each(db, records.UPDATE_TRAJECTORY, changed)
        drops, chunks = self._tokens.plan(self._with_new_tokens(everything))
        db.executemany("DELETE FROM chunks WHERE trajectory_id = ?", drops)
        db.executemany(records.INSERT_CHUNK, chunks)

    def _with_new_tokens(self, everything: bool) -> list[Trajectory]:
        for trajectory_id in self._dirty:
            self._growing.pop(trajectory_id, None)
        share = min(len(self._growing) // GROWING_FLUSHES, self._num_grown // GROWN_MIN)
        num = len(self._growing) if everything else max(GROWING_MIN, share)
        return [*self._dirty.values(), *islice(self._growing.values(), num)]

    def write_step(self, db: sqlite3.Connection, record: StepRecord, wall_s: float) -> None:
        db.execute(records.INSERT_STEP, records.step_row(record, wall_s))
        _change_each(db, _TRAIN, [(record.version, i) for i in record.trajectory_ids])

    def written(self, trained: Iterable[int]) -> None:
        for trajectory_id in trained:
            self.accounts.move(trajectory_id, State.TRAINED)
        self._rows.update(self._planned)
        ended = [i for i in (*self._dirty, *trained) if self.accounts.states[i] in TERMINAL]
        for trajectory_id in self._tokens.planned:
            self._growing.pop(trajectory_id, None)
        self._tokens.confirm(ended)
        self.accounts.settle(ended)
        for trajectory_id in ended:
            self._rows.pop(trajectory_id, None)
        self._groups, self._skips, self._dirty, self.published = {}, [], {}, []
        self._num_grown = 0

    def _look_at(self, trajectory: Trajectory) -> None:
        if trajectory.state is not State.TRAINED:
            self.accounts.move(trajectory.trajectory_id, trajectory.state)


def _change_each(db: sqlite3.Connection, statement: str, rows: list[tuple[Any, ...]]) -> None:
    """Every row of parameters must change exactly one row of the file."""
    if rows and (changed := db.executemany(statement, rows).rowcount) != len(rows):
        raise LedgerError(
            f"{len(rows) - changed} of {len(rows)} trajectories are missing, ended or damaged in the file\n"
            "  The disk or another program changed it: resume from a copy of the run."
        )


class _Mark(NamedTuple):
    """The number of recorded tokens of a trajectory, and their columns."""

    columns: TokenColumns
    num_tokens: int
    squeezed: bool


_NOTHING = _Mark(TokenColumns(), 0, False)


class TokenLog:
    """Plans chunk rows. A plan counts as recorded only after `confirm`."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}
        self.planned: dict[int, _Mark] = {}  # by trajectory, of the last plan

    def recorded(self, trajectory: Trajectory) -> None:
        """Note that the present tokens of `trajectory` were read from the file."""
        self._marks[trajectory.trajectory_id] = _mark(trajectory)

    def plan(self, trajectories: Iterable[Trajectory]) -> tuple[list[tuple[int]], list[ChunkRow]]:
        """(trajectories whose chunks are deleted, rows to insert)."""
        drops: list[tuple[int]] = []
        rows: list[ChunkRow] = []
        self.planned = {}
        for trajectory in trajectories:
            trajectory_id, columns = trajectory.trajectory_id, trajectory.columns
            mark = self._marks.get(trajectory_id, _NOTHING)
            if mark.squeezed and mark.columns is columns and mark.num_tokens == len(columns):
                continue
            now = _mark(trajectory)
            goes_on = mark.columns is now.columns and (mark.squeezed or not now.squeezed)
            start = mark.num_tokens if goes_on else 0
            if start == 0 and mark.num_tokens:
                drops.append((trajectory_id,))
            if now.num_tokens > start:
                rows.append(chunk_row(trajectory_id, start, now.columns, squeeze=now.squeezed))
            self.planned[trajectory_id] = now
        return drops, rows

    def confirm(self, ended: Iterable[int]) -> None:
        """Note that the last plan is in the file, and forget trajectories that have `ended`."""
        self._marks.update(self.planned)
        self.planned = {}
        for trajectory_id in ended:
            self._marks.pop(trajectory_id, None)


def _mark(trajectory: Trajectory) -> _Mark:
    return _Mark(trajectory.columns, len(trajectory.columns), is_final(trajectory))
