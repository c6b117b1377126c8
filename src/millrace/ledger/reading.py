"""Reads a run's ledger without disturbing the run: while it goes on, after its end, after a kill."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.completion.columns import OBSERVED
from millrace.core.errors import LedgerError
from millrace.core.types import (
    RESTS,
    Accounting,
    CheckpointInfo,
    EvaluationAttempt,
    EvaluationRecord,
    Group,
    State,
    StepRecord,
    Trajectory,
)
from millrace.ledger import evaluation_records, records
from millrace.ledger.accounts import Accounts
from millrace.ledger.codec import version_runs
from millrace.ledger.opening import begin_reading, open_for_reading, read_about, reading
from millrace.ledger.recovery import last_version
from millrace.ledger.samples import (
    ANY,
    Choice,
    Draw,
    Sample,
    SampleFilter,
    count_samples,
    groups_end,
    load_before,
    load_draws,
    load_of_groups,
    load_samples,
)

_STOP_CHECKED_EVERY = 100_000
"""SQLite calls `stop` after so many of its instructions, which take some milliseconds."""


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run at a glance. `states` counts trajectories."""

    about: dict[str, Any]  # the description given at creation
    version: int
    accounting: Accounting
    states: dict[str, int]
    num_groups: int
    num_skipped: int
    num_rested: int  # prompts of rows that rest, which are not among the skipped
    num_tokens: int  # completion tokens recorded, of all trajectories
    checkpoint: CheckpointInfo | None  # newest recorded; its directory is not looked at


@dataclass(frozen=True, slots=True)
class Skipped:
    group_id: int
    row_id: str
    reason: str


class LedgerReader:
    """Read-only queries on a run's ledger. Each query sees the newest flush; no query takes a lock or writes.
    With `check` the whole file is checked first, if it has no more than 1 GiB. Without, each row is checked
    when it is read. A query ends with LedgerError soon after `stop` returns True.

    Raises:
        LedgerError: the file does not exist, is no ledger, is damaged or of another format; or the
            requested record is not in it.
    """

    def __init__(
        self, path: str | Path, *, check: bool = True, stop: Callable[[], bool] | None = None
    ) -> None:
        self._path = os.path.abspath(path)
        self._db = open_for_reading(self._path, check=check)
        if stop is not None:
            self._db.set_progress_handler(stop, _STOP_CHECKED_EVERY)

    def overview(self) -> RunOverview:
        with self._snapshot("read the run"):
            counts = records.read_counts(self._db)
            return RunOverview(
                about=read_about(self._db),
                version=last_version(self._db),
                accounting=Accounts(counts).accounting(),
                states={state.value: counts[state.value] for state in State},
                num_groups=self._one("SELECT count(*) FROM groups"),
                num_skipped=self._one(f"SELECT count(*) FROM skipped WHERE reason NOT GLOB '{RESTS}*'"),
                num_rested=self._one(f"SELECT count(*) FROM skipped WHERE reason GLOB '{RESTS}*'"),
                num_tokens=self._one("SELECT ifnull(sum(num_tokens), 0) FROM chunks"),
                checkpoint=self._checkpoint(),
            )

    def steps(self) -> list[StepRecord]:
        """Every committed step, in order of version."""
        with self._snapshot("read the steps"):
            return [
                records.to_step(row) for row in self._db.execute(f"{records.SELECT_STEPS} ORDER BY version")
            ]

    def step(self, version: int) -> StepRecord:
        with self._snapshot(f"read step {version}"):
            query = f"{records.SELECT_STEPS} WHERE version = ?"
            row = self._db.execute(query, (version,)).fetchone()
            return records.to_step(self._required(row, f"step {version}", "steps", "version"))

    def evaluations(self) -> list[EvaluationRecord]:
        """All evaluations, also skipped ones, in the order of their versions."""
        with self._snapshot("read the evaluations"):
            return evaluation_records.load(self._db)

    def attempts(self, name: str, version: int) -> list[EvaluationAttempt]:
        """The attempts of one evaluation, by prompt, with their tokens."""
        with self._snapshot(f"read evaluation {name} of {version}"):
            return evaluation_records.load_attempts(self._db, name, version)

    def trajectory(self, trajectory_id: int) -> Trajectory:
        """A trajectory with its tokens."""
        with self._snapshot(f"read trajectory {trajectory_id}"):
            query = f"{records.SELECT_TRAJECTORIES} WHERE trajectory_id = ?"
            row = self._db.execute(query, (trajectory_id,)).fetchone()
            what = f"trajectory {trajectory_id}"
            return records.load_trajectory(
                self._db, self._required(row, what, "trajectories", "trajectory_id")
            )

    def find(self, trajectory_id: int) -> Trajectory | None:
        """As `trajectory`; None: there is none with this id."""
        with self._snapshot(f"read trajectory {trajectory_id}"):
            query = f"{records.SELECT_TRAJECTORIES} WHERE trajectory_id = ?"
            row = self._db.execute(query, (trajectory_id,)).fetchone()
            return None if row is None else records.load_trajectory(self._db, row)

    def group_ids(self) -> set[int]:
        """The ids of all admitted groups."""
        with self._snapshot("read the groups"):
            return {row[0] for row in self._db.execute("SELECT group_id FROM groups")}

    def group(self, group_id: int) -> Group:
        """A group with all members and their tokens."""
        with self._snapshot(f"read group {group_id}"):
            row = self._db.execute("SELECT 1 FROM groups WHERE group_id = ?", (group_id,)).fetchone()
            self._required(row, f"group {group_id}", "groups", "group_id")
            return records.load_group(self._db, group_id)

    def groups(self, group_ids: Sequence[int] | None = None) -> Iterator[Group]:
        """The named groups, by default all admitted groups, one at a time, with members and tokens."""
        with self._snapshot("read the groups"):
            every = self._db.execute("SELECT group_id FROM groups ORDER BY group_id").fetchall()
            for group_id in [row[0] for row in every] if group_ids is None else group_ids:
                yield records.load_group(self._db, group_id)

    def trained_prompts(self, version: int, *, by_row: bool) -> set[str]:
        """The texts of the prompts that the versions up to `version` were trained on. `by_row`: the digests
        of their rows, of which a file of an older format has none."""
        trained = "SELECT group_id FROM trajectories WHERE trained_version <= ?"
        column, table = ("digest", "row_digests") if by_row else ("text", "groups")
        with self._snapshot("read the prompts"):
            if not self._one(f"SELECT count(*) FROM sqlite_schema WHERE name = '{table}'"):
                return set()
            rows = self._db.execute(f"SELECT {column} FROM {table} WHERE group_id IN ({trained})", (version,))
            return {row[0] for row in rows}

    def samples(self, choice: Choice, num: int, only: SampleFilter = ANY) -> list[Sample]:
        """At most `num` trajectories, chosen by `choice`, with prompt and tokens."""
        with self._snapshot("read samples"):
            return load_samples(self._db, choice, num, only)

    def num_samples(self, choice: Choice, only: SampleFilter) -> int:
        """The number of trajectories that `samples` chooses from."""
        with self._snapshot("count samples"):
            return count_samples(self._db, choice, only)

    def samples_before(self, trajectory_id: int | None, num: int, only: SampleFilter = ANY) -> list[Sample]:
        """The newest `num` trajectories before `trajectory_id` whose generation has ended; None: of all."""
        with self._snapshot("read samples"):
            return load_before(self._db, trajectory_id, num, only)

    def groups_end(self) -> int:
        """One more than the newest group, admitted or skipped."""
        with self._snapshot("read the groups"):
            return groups_end(self._db)

    def draws(self, row_id: str, first: int, stop: int) -> list[Draw]:
        """See `draws.load_draws`."""
        with self._snapshot(f"read the draws of {row_id}"):
            return load_draws(self._db, row_id, first, stop)

    def samples_of_groups(self, part: tuple[float, float], num: int, *, paid: bool) -> list[Sample]:
        """See `samples.load_of_groups`."""
        with self._snapshot("read samples"):
            return load_of_groups(self._db, part, num, paid=paid)

    def reward_range(self) -> tuple[float | None, float | None, int]:
        """The lowest and the highest reward, and how many there are."""
        query = "SELECT min(reward), max(reward), count(reward) FROM trajectories"
        with self._snapshot("read the rewards"):
            low, high, num = self._db.execute(query).fetchone()
            return low, high, num

    def skipped(self) -> list[Skipped]:
        with self._snapshot("read skipped prompts"):
            rows = self._db.execute("SELECT group_id, row_id, reason FROM skipped ORDER BY group_id")
            return [Skipped(*row) for row in rows]

    def states(self) -> dict[str, int]:
        """The number of trajectories in each state: no trajectory is read."""
        with self._snapshot("read the counts"):
            return dict(records.read_counts(self._db))

    def reasons(self) -> dict[tuple[str, str], int]:
        """The number of trajectories of each (state, reason)."""
        with self._snapshot("read reasons"):
            query = "SELECT state, reason, count(*) FROM trajectories GROUP BY state, reason"
            return {(state, reason): num for state, reason, num in self._db.execute(query)}

    def lengths(self, state: State | None = None) -> list[int]:
        """Completion tokens of each trajectory (in `state`), by id."""
        where, values = ("WHERE state = ?", (state.value,)) if state else ("", ())
        grown = "(SELECT ifnull(sum(num_tokens), 0) FROM chunks WHERE chunks.trajectory_id = t.trajectory_id)"
        query = f"SELECT ifnull(num_tokens, {grown}) FROM trajectories t {where} ORDER BY trajectory_id"
        with self._snapshot("read lengths"):
            return [row[0] for row in self._db.execute(query, values)]

    def staleness_histogram(self, version: int | None = None) -> dict[int, int]:
        """Trained tokens by staleness, in versions; of one step (by the version it made) or all."""
        which, values = ("= ?", (version,)) if version is not None else ("IS NOT NULL", ())
        query = (
            "SELECT trained_version, versions FROM trajectories JOIN chunks USING (trajectory_id)"
            f" WHERE trained_version {which}"
        )
        histogram: Counter[int] = Counter()
        with self._snapshot("read staleness"):
            for trained_version, runs in self._db.execute(query, values):
                for sampled_version, num_tokens in version_runs(runs):
                    if sampled_version != OBSERVED:
                        histogram[trained_version - 1 - sampled_version] += num_tokens
        return dict(sorted(histogram.items()))

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _snapshot(self, doing: str) -> Iterator[None]:
        """All queries inside this context see the same flush."""
        with reading(self._path, doing):
            begin_reading(self._db)
            try:
                yield
            finally:
                self._db.rollback()

    def _one(self, query: str) -> Any:
        return self._db.execute(query).fetchone()[0]

    def _checkpoint(self) -> CheckpointInfo | None:
        row = self._db.execute(f"{records.SELECT_CHECKPOINTS} LIMIT 1").fetchone()
        return records.to_checkpoint(row, os.path.dirname(self._path)) if row else None

    def _required(self, row: Any, what: str, table: str, key: str) -> Any:
        if row is None:
            low, high = self._db.execute(f"SELECT min({key}), max({key}) FROM {table}").fetchone()
            contents = f"it holds {low} to {high}" if low is not None else "it holds none yet"
            raise LedgerError(f"ledger {self._path}: there is no {what}; {contents}")
        return row
