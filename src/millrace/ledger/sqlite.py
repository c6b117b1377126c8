"""The ledger in SQLite: one file a run, one writer, one transaction a flush.

The ledger buffers records by reference. `flush` writes them with their values at that moment. A transaction
survives the death of the process at any instant; a committed step or checkpoint also survives the death of
the machine (its transaction waits for the disk, others do not).
"""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from millrace.core.clock import wall
from millrace.core.errors import LedgerError
from millrace.core.types import (
    TERMINAL,
    Accounting,
    BadPrompt,
    CheckpointInfo,
    EvaluationAttempt,
    EvaluationRecord,
    Group,
    GroupOutcome,
    State,
    StepRecord,
    Trajectory,
    VersionRecord,
)
from millrace.ledger import evaluation_records, records
from millrace.ledger.accounts import Accounts, refuse_imbalance
from millrace.ledger.buffer import Buffer
from millrace.ledger.checksums import refuse_damage
from millrace.ledger.ledger_schema import LIVE_STATES
from millrace.ledger.lock import RunLock
from millrace.ledger.opening import (
    MEMORY,
    Log,
    identity,
    keeping_the_log,
    ledger_failures,
    open_for_writing,
    read_about,
    reading,
    refuse_moved,
)
from millrace.ledger.records import load_group
from millrace.ledger.recovery import (
    CheckpointOk,
    Recovery,
    last_version,
    live_group_ids,
    newest_checkpoint,
    read_recovery,
    steps_after,
)

_FOLD_CHANGES = 20_000  # rows after which a step folds the write-ahead log back into the file


def _directory_exists(info: CheckpointInfo) -> bool:
    return os.path.isdir(info.path)


class SqliteLedger:
    """The durable record of one run. Implements `core.protocols.Ledger`.

    `path` is the run's file, or ":memory:" for a simulation. `run` describes a new run; an existing file
    keeps its description, which is `self.run`. `checkpoint_ok` says whether a checkpoint is whole. On an
    existing file, call `recover` before anything else. Not for use from several threads.

    Raises:
        LedgerError: the file is in use, damaged, not a ledger, or of another format; later, when the
            disk is full or the accounts do not close. A failed flush loses nothing: the buffer
            stays, and flushing again may succeed.
    """

    def __init__(
        self, path: str | Path, *, run: Mapping[str, Any], checkpoint_ok: CheckpointOk = _directory_exists
    ) -> None:
        self._checkpoint_ok = checkpoint_ok
        self._path = MEMORY if path == MEMORY else os.path.abspath(path)
        self._directory = os.path.dirname(self._path)
        self._lock = None if path == MEMORY else RunLock(self._path)
        self._log = Log(self._path)
        self._closed = self._failed = False
        self._folded_at = 0  # total changes of the connection
        try:
            self._db = open_for_writing(self._path, run)
            self._identity = identity(self._path)
            with reading(self._path, "open"):
                self.run = read_about(self._db)
                self._accounts = Accounts(records.read_counts(self._db))
                self._version: int = last_version(self._db)  # after the last committed step
                self._refuse_lost_rows()
                evaluation_records.refuse_lost(self._db)
            self._buffer = Buffer(self._accounts)
        except BaseException:
            self._release()
            raise

    # ------------------------------------------------------------ recording

    def admit(self, groups: Sequence[Group]) -> None:
        """Raises LedgerError: an id is used twice. For an ended trajectory the flush raises the error."""
        for group in groups:
            self._buffer.admit(group)

    def skip(self, prompts: Sequence[BadPrompt]) -> None:
        self._buffer.skip(prompts)

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Record changes. `commit_step` alone records TRAINED; here that state changes nothing.

        Raises LedgerError: a trajectory is unknown, or has ended in another state.
        """
        for trajectory in trajectories:
            if trajectory.trajectory_id in self._accounts.states:
                self._buffer.update(trajectory)
            else:
                self._refuse_unless_ended_so(trajectory)

    def grow(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises LedgerError: a trajectory is unknown, or has ended."""
        for trajectory in trajectories:
            if trajectory.trajectory_id not in self._accounts.states:
                self._refuse_unless_ended_so(trajectory)
        self._buffer.grow(trajectories)

    def flush(self) -> Accounting:
        self._write()
        return self.accounting()

    def commit_step(self, record: StepRecord) -> None:
        """Write the buffer, the record and its trajectories' end in one durable transaction.

        Raises LedgerError: a trajectory has ended before, or versions do not follow.
        """
        if record.version != self._version + 1:
            raise LedgerError(
                f"ledger {self._path}: step {record.version} does not follow step {self._version}\n"
                "  Steps are committed one by one, in order."
            )
        self._refuse_training_again(record)
        self._write(record)
        self._version = record.version
        self._log.committed(record.version)
        self._fold_log()

    def commit_checkpoint(self, info: CheckpointInfo) -> None:
        """Raises LedgerError: the checkpoint covers a step that is not committed."""
        if info.version > self._version:
            raise LedgerError(
                f"ledger {self._path}: checkpoint {info.version} covers steps after {self._version}, "
                "the last committed one\n  Commit a step before saving what it made."
            )
        with self._transaction(f"commit checkpoint {info.version}", synced=True):
            row = (info.version, records.relative(info.path, self._directory), info.save_s, wall())
            self._db.execute(records.INSERT_CHECKPOINT, row)

    def record_version(self, record: VersionRecord) -> None:
        self._buffer.published.append(record)

    def evaluated(self, record: EvaluationRecord, attempts: Sequence[EvaluationAttempt]) -> None:
        """Raises LedgerError: the version is not committed, or the evaluation is recorded already."""
        if record.version > self._version or any(
            (record.name, record.version) == (known.name, known.version) for known in self.evaluations()
        ):
            raise LedgerError(
                f"ledger {self._path}: evaluation {record.name} of version {record.version} cannot be "
                f"recorded after version {self._version}\n  A version is evaluated once under a name."
            )
        with self._transaction(f"record evaluation {record.name} of {record.version}", synced=True):
            evaluation_records.insert(self._db, record, attempts, wall())

    def evaluations(self) -> list[EvaluationRecord]:
        with reading(self._path, "read the evaluations"):
            return evaluation_records.load(self._db)

    def rewind(self, version: int) -> int:
        """Go back to a committed version, durably. Returns the number of trajectories that end by it. Meant
        for the start of a run, before `recover`.

        Raises LedgerError: there is no such version, or something is recorded already.
        """
        with self._transaction(f"go back to version {version}", synced=True):
            ended = rewind(self._db, version)
        with ledger_failures(self._path, "fold the log"):
            self._db.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
        self._log.committed(version)
        self._accounts = Accounts(records.read_counts(self._db))
        self._buffer, self._version = Buffer(self._accounts), version
        return ended

    # ------------------------------------------------------------ reading

    @property
    def version(self) -> int:
        """The version of the last committed step; 0 if there is no step."""
        return self._version

    def accounting(self) -> Accounting:
        """The accounts, including the buffer."""
        return self._accounts.accounting()

    def recover(self) -> Recovery:
        """Flush everything, and read the state from the file. Meant for the start of a run, because it reads
        every live group. It may be called at any time: trajectories that this object knows already are only
        read.

        Raises LedgerError: the file is damaged, or committed steps are missing. Then only `rewind` is
        possible.
        """
        self._log.refuse_rolled_back(self._version)
        self._write(everything=True)
        with reading(self._path, "recover"):
            recovery = read_recovery(self._db)
        for trajectory, recorded in recovery.live:
            if trajectory.trajectory_id not in self._accounts.states:
                self._buffer.adopt(trajectory, recorded)
        return recovery

    def checkpoint(self) -> CheckpointInfo | None:
        """The newest whole checkpoint."""
        with reading(self._path, "look for a checkpoint"):
            return newest_checkpoint(self._db, self._directory, self._checkpoint_ok)

    def steps_after(self, version: int) -> list[StepRecord]:
        with reading(self._path, f"read the steps after {version}"):
            return steps_after(self._db, version)

    def version_records(self, version: int) -> list[VersionRecord]:
        with reading(self._path, f"read version {version}"):
            recorded = records.load_published(self._db, version)
        return recorded + [record for record in self._buffer.published if record.version == version]

    def group(self, group_id: int) -> Group:
        with reading(self._path, f"read group {group_id}"):
            return records.load_group(self._db, group_id)

    def completions(self, version: int, group_id: int, num: int) -> list[array[int]]:
        with reading(self._path, f"read completions of group {group_id}"):
            return records.load_completions(self._db, version, group_id, num)

    def outcomes(self, step: StepRecord) -> list[GroupOutcome]:
        with reading(self._path, f"read the rewards of step {step.version}"):
            return [records.load_outcome(self._db, step.version, group_id) for group_id in step.group_ids]

    def close(self) -> None:
        """Flush everything, unless the last write failed, and release the run. Idempotent.

        Raises LedgerError: the file cannot be written, or was damaged while it was open.
        """
        if self._closed:
            return
        try:
            if not self._failed:
                self._write(everything=True)
                self._check_the_end()
        finally:
            self._release()

    def _check_the_end(self) -> None:
        """Fold everything into the one file, and read the file as a resume does."""
        with reading(self._path, "close"):
            busy = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            refuse_damage(self._db)
        if not busy:  # with a reader of the run, which keeps the log
            self._log.folded(self._version)

    # ------------------------------------------------------------ writing

    def _write(self, record: StepRecord | None = None, *, everything: bool = False) -> None:
        trained = record.trajectory_ids if record else []
        doing = f"commit step {record.version}" if record else "flush"
        self._buffer.look_again(trained)
        counts = self._accounts.counts_after_training(trained)
        with self._transaction(doing, synced=record is not None):
            self._buffer.write(self._db, everything=everything)
            if record is not None:
                self._buffer.write_step(self._db, record, wall())
            refuse_imbalance(self._path, self._accounts.admitted, counts, records.read_counts(self._db))
        self._buffer.written(trained)

    @contextmanager
    def _transaction(self, doing: str, *, synced: bool) -> Iterator[None]:
        """All or nothing. `synced`: it waits for the disk."""
        self._failed = True
        refuse_moved(self._path, self._identity, doing)
        self._log.refuse_cut(doing)
        with ledger_failures(self._path, doing):
            if synced:
                self._db.execute("PRAGMA synchronous = FULL")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            finally:
                with suppress(sqlite3.Error):  # after some failures SQLite has already rolled back
                    self._db.rollback()
                if synced:
                    self._db.execute("PRAGMA synchronous = NORMAL")
        self._log.look()
        self._failed = False

    def _fold_log(self) -> None:
        """Bound the write-ahead log, at a moment that waits for the disk anyway."""
        if self._db.total_changes - self._folded_at > _FOLD_CHANGES:
            with ledger_failures(self._path, "fold the log"):
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._folded_at = self._db.total_changes

    # ------------------------------------------------------------ opening and refusing

    def _refuse_lost_rows(self) -> None:
        """Count all rows once, on opening."""
        counts = dict(self._db.execute("SELECT state, count(*) FROM trajectories GROUP BY state").fetchall())
        counts["admitted"] = sum(counts.values())
        refuse_imbalance(self._path, self._accounts.admitted, self._accounts.counts, counts)

    def _refuse_training_again(self, record: StepRecord) -> None:
        seen: set[int] = set()
        for trajectory_id in record.trajectory_ids:
            state = self._accounts.states.get(trajectory_id)
            live = state is not None and state not in TERMINAL
            if not live or trajectory_id in seen:
                was = "is named twice" if live else self._what_became_of(trajectory_id)
                raise LedgerError(
                    f"ledger {self._path}: step {record.version} cannot train trajectory {trajectory_id}: "
                    f"it {was}\n  A trajectory is trained at most once."
                )
            seen.add(trajectory_id)

    def _refuse_unless_ended_so(self, trajectory: Trajectory) -> None:
        ended = self._ended(trajectory.trajectory_id)
        if ended is None or ended[0] is not trajectory.state:
            was = self._what_became_of(trajectory.trajectory_id)
            raise LedgerError(
                f"ledger {self._path}: trajectory {trajectory.trajectory_id} {was} and cannot become "
                f"{trajectory.state}\n  A trajectory has exactly one terminal state."
            )

    def _what_became_of(self, trajectory_id: int) -> str:
        ended = self._ended(trajectory_id)
        if ended is None:
            return "is not known (admit it, or recover first)"
        return f"ended as {ended[0]}" + (f" in step {ended[1]}" if ended[1] is not None else "")

    def _ended(self, trajectory_id: int) -> tuple[State, int | None] | None:
        if (state := self._accounts.states.get(trajectory_id)) in TERMINAL:
            return state, None
        query = "SELECT state, trained_version FROM trajectories WHERE trajectory_id = ?"
        with reading(self._path, f"look for trajectory {trajectory_id}"):
            row = self._db.execute(query, (trajectory_id,)).fetchone()
        return (State(row[0]), row[1]) if row and State(row[0]) in TERMINAL else None

    def _release(self) -> None:
        self._closed = True
        try:
            if hasattr(self, "_db"):
                with keeping_the_log(self._path) if self._log.is_cut else nullcontext():
                    self._db.close()
        finally:
            if self._lock is not None:
                self._lock.release()


def rewind(db: sqlite3.Connection, version: int) -> int:
    """Rewind inside a transaction. Returns the number of trajectories that end by it.

    Raises LedgerError: `version` was never committed.
    """
    newest = last_version(db)
    if not 0 <= version <= newest:
        raise LedgerError(
            f"the run cannot go back to version {version}: it has versions 0 to {newest}\n"
            "  Give one of them with --from-version."
        )
    reason = f"undone: the run went back from version {newest} to {version}"
    ended = db.execute(
        f"UPDATE trajectories SET state = '{State.REJECTED}', reason = ?, trained_version = NULL"
        " WHERE trained_version > ?",
        (reason, version),
    ).rowcount
    for group_id in live_group_ids(db):
        members = load_group(db, group_id).members
        if any(sampled > version for member in members for sampled, _ in member.columns.runs):
            ended += _end(db, group_id, reason)
    db.execute("DELETE FROM steps WHERE version > ?", (version,))
    db.execute("DELETE FROM checkpoints WHERE version > ?", (version,))
    for table in ("published", "evaluations", "evaluation_attempts"):
        db.execute(f"DELETE FROM {table} WHERE version > ?", (version,))
    return ended


def _end(db: sqlite3.Connection, group_id: int, reason: str) -> int:
    """End the live members of a group. Their tokens change no more."""
    counted = "(SELECT ifnull(sum(c.num_tokens), 0) FROM chunks c WHERE c.trajectory_id = t.trajectory_id)"
    return db.execute(
        f"UPDATE trajectories AS t SET state = '{State.REJECTED}', reason = ?, num_tokens = {counted}"
        f" WHERE group_id = ? AND state IN {LIVE_STATES}",
        (reason, group_id),
    ).rowcount
