"""Converts between rows of the file and the types of `core`."""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import LedgerError
from millrace.core.types import (
    CheckpointInfo,
    Finish,
    Group,
    GroupOutcome,
    Prompt,
    State,
    StepRecord,
    Trajectory,
    VersionRecord,
)
from millrace.ledger import older_formats
from millrace.ledger.checksums import DamageError, checked
from millrace.ledger.codec import (
    pack_plain,
    pack_prompt,
    pack_squeezed,
    pack_versions,
    unpack_columns,
    unpack_metrics,
    unpack_prompt,
    with_bounds,
)
from millrace.ledger.ledger_schema import insert_into, intact

INSERT_GROUP = insert_into("groups")
INSERT_ROW_DIGEST = insert_into("row_digests")
INSERT_SKIPPED = "INSERT OR REPLACE INTO skipped (group_id, row_id, reason) VALUES (?, ?, ?)"
INSERT_CHUNK = insert_into("chunks")
INSERT_STEP = insert_into("steps")
INSERT_TRAJECTORY = (
    "INSERT INTO trajectories (state, reason, replica, epoch, lease, num_tokens, finish, reward, metrics,"
    " trajectory_id, group_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
UPDATE_TRAJECTORY = (
    "UPDATE trajectories SET state = ?, reason = ?, replica = ?, epoch = ?, lease = ?, num_tokens = ?,"
    f" finish = ?, reward = ?, metrics = ? WHERE trajectory_id = ? AND {intact('trajectories')}"
)
SELECT_TRAJECTORIES = (
    "SELECT trajectory_id, group_id, state, reason, replica, epoch, lease, num_tokens, finish,"
    f" reward, metrics, trained_version, {intact('trajectories')} FROM trajectories"
)
SELECT_STEPS = f"SELECT version, group_ids, trajectory_ids, metrics, {intact('steps')} FROM steps"
SELECT_CHECKPOINTS = (
    f"SELECT version, path, save_s, {intact('checkpoints')} FROM checkpoints ORDER BY version DESC"
)
_SELECT_GROUP = f"SELECT group_id, row_id, prompt, text, {intact('groups')} FROM groups WHERE group_id = ?"
_SELECT_CHUNKS = (
    f"SELECT trajectory_id, start, versions, data, {intact('chunks')} FROM chunks"
    " WHERE trajectory_id = ? ORDER BY start"
)
_SELECT_TRAINED = (
    "SELECT reward, trajectory_id FROM trajectories"
    " WHERE group_id = ? AND trained_version = ? ORDER BY trajectory_id"
)
INSERT_PUBLISHED = insert_into("published")
SELECT_PUBLISHED = (
    f"SELECT version, digest, arithmetic, {intact('published')} FROM published"
    " WHERE version = ? ORDER BY rowid"
)
INSERT_CHECKPOINT = "INSERT OR REPLACE INTO checkpoints (version, path, save_s, wall_s) VALUES (?, ?, ?, ?)"

ChunkRow = tuple[int, int, int, bytes, bytes]  # parameters of INSERT_CHUNK


def group_row(group: Group) -> tuple[Any, ...]:
    return group.group_id, group.row_id, pack_prompt(group.prompt), group.text


def is_final(trajectory: Trajectory) -> bool:
    """The tokens of the trajectory change no more."""
    return trajectory.finish not in (None, Finish.TURN) or not trajectory.live


def trajectory_row(trajectory: Trajectory, state: State) -> tuple[Any, ...]:
    """Parameters of UPDATE_TRAJECTORY and, with the group id added, of INSERT_TRAJECTORY."""
    return (
        state.value,
        trajectory.reason,
        trajectory.replica,
        trajectory.epoch,
        trajectory.lease,
        len(trajectory.columns) if is_final(trajectory) else None,
        trajectory.finish.value if trajectory.finish else None,
        trajectory.reward,
        encode(with_bounds(trajectory.metrics, trajectory.bounds)),
        trajectory.trajectory_id,
    )


def chunk_row(trajectory_id: int, start: int, columns: TokenColumns, *, squeeze: bool) -> ChunkRow:
    """The tokens from `start` on."""
    new = columns[start:] if start else columns
    data = pack_squeezed(new) if squeeze else pack_plain(new)
    return trajectory_id, start, len(new), pack_versions(new.runs), data


def step_row(record: StepRecord, wall_s: float) -> tuple[Any, ...]:
    ids = encode(record.group_ids), encode(record.trajectory_ids)
    return record.version, *ids, encode(record.metrics), wall_s


def encode(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise LedgerError(
            f"the ledger cannot record {value!r}: {error}\n  Metrics are plain numbers and strings."
        ) from error


def to_step(row: Sequence[Any]) -> StepRecord:
    version, group_ids, trajectory_ids, metrics = checked("steps", row)
    decode = msgspec.msgpack.decode
    return StepRecord(version, decode(group_ids), decode(trajectory_ids), decode(metrics, strict=False))


def to_checkpoint(row: Sequence[Any], directory: str) -> CheckpointInfo:
    version, path, save_s = checked("checkpoints", row)
    return CheckpointInfo(version=version, path=os.path.join(directory, path), save_s=save_s)


def load_published(db: sqlite3.Connection, version: int) -> list[VersionRecord]:
    """Raises DamageError."""
    return [VersionRecord(*checked("published", row)) for row in db.execute(SELECT_PUBLISHED, (version,))]


def relative(path: str, directory: str) -> str:
    """The path as recorded. A path in the ledger's directory moves with the ledger; other paths are
    absolute."""
    inside = directory and os.path.commonpath([os.path.abspath(path), directory]) == directory
    return os.path.relpath(path, directory) if inside else path


def load_prompt(db: sqlite3.Connection, group_id: int) -> Prompt:
    """The prompt of an admitted group. Raises DamageError."""
    row = db.execute(_SELECT_GROUP, (group_id,)).fetchone()
    if row is None:
        raise DamageError(f"table groups, group_id {group_id}: the row is missing")
    _, row_id, prompt, text = checked("groups", row)
    return Prompt(group_id, row_id, unpack_prompt(prompt), text)


def load_group(db: sqlite3.Connection, group_id: int) -> Group:
    """A group with all members, by id, and their tokens. Raises DamageError."""
    prompt = load_prompt(db, group_id)
    rows = db.execute(f"{SELECT_TRAJECTORIES} WHERE group_id = ? ORDER BY trajectory_id", (group_id,))
    members = [load_trajectory(db, member) for member in rows.fetchall()]
    return Group(group_id, prompt.row_id, prompt.tokens, prompt.text, members)


def load_outcome(db: sqlite3.Connection, version: int, group_id: int) -> GroupOutcome:
    """The rewards of the members that the step to `version` was trained with."""
    [row_id] = db.execute("SELECT row_id FROM groups WHERE group_id = ?", (group_id,)).fetchone()
    trained = db.execute(_SELECT_TRAINED, (group_id, version)).fetchall()
    return GroupOutcome(group_id, row_id, [reward for reward, _ in trained])


def load_trajectory(db: sqlite3.Connection, row: Sequence[Any]) -> Trajectory:
    """The trajectory of a row of SELECT_TRAJECTORIES, with its tokens. Raises DamageError."""
    tid, group_id, state, reason, replica, epoch, lease, num_tokens, *others = checked("trajectories", row)
    finish, reward, metrics, trained = others
    columns = _load_columns(db, tid)
    if num_tokens is not None and len(columns) != num_tokens:
        raise DamageError(f"trajectory {tid} has {len(columns)} of its {num_tokens} tokens")
    trajectory = Trajectory(tid, group_id, State(state), reason, replica, epoch, lease, columns)
    trajectory.finish, trajectory.reward = Finish(finish) if finish else None, reward
    trajectory.metrics, trajectory.bounds = unpack_metrics(older_formats.present_metrics(db, metrics))
    trajectory.trained_version = trained
    return trajectory


def read_counts(db: sqlite3.Connection) -> dict[str, int]:
    """The counts that the file's triggers keep. A file of an older format has no count of newer states."""
    return {state.value: 0 for state in State} | dict(db.execute("SELECT name, num FROM counts").fetchall())


def load_completions(db: sqlite3.Connection, version: int, group_id: int, num: int) -> list[array[int]]:
    """The tokens of the `num` highest rewards that the step to `version` was trained with. Raises
    DamageError."""
    trained = db.execute(_SELECT_TRAINED, (group_id, version)).fetchall()
    best = sorted(trained, key=lambda one: -one[0])[:num]
    return [_load_columns(db, trajectory_id).tokens for _, trajectory_id in best]


def _load_columns(db: sqlite3.Connection, trajectory_id: int) -> TokenColumns:
    columns = TokenColumns()
    for chunk in db.execute(_SELECT_CHUNKS, (trajectory_id,)):
        _, start, versions, data = checked("chunks", chunk)
        if start != len(columns):
            break
        columns.extend(unpack_columns(data, versions))
    return columns
