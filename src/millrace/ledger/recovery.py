"""The state of a ledger from which a run resumes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from millrace.core.types import CheckpointInfo, Group, State, StepRecord, Trajectory
from millrace.ledger.ledger_schema import LIVE_STATES
from millrace.ledger.records import SELECT_CHECKPOINTS, SELECT_STEPS, load_group, to_checkpoint, to_step

CheckpointOk = Callable[[CheckpointInfo], bool]


@dataclass(slots=True)
class Recovery:
    """The state that was read from the ledger. `unused_group_ids` are positions of the data stream below
    `next_group_id` that were neither admitted nor skipped. There are none, because the controller admits in
    order.
    """

    next_group_id: int
    groups: list[Group]
    version: int
    reached: int
    unused_group_ids: list[int]
    quarantined: list[str]
    live: list[tuple[Trajectory, State]]  # and the state in the file


def read_recovery(db: sqlite3.Connection) -> Recovery:
    """Leases do not survive. Leased trajectories are queued again, with their tokens.

    Raises DamageError: a group or a token that the record refers to is missing or damaged.
    """
    next_group_id, unused = _positions(db)
    groups = [load_group(db, group_id) for group_id in live_group_ids(db)]
    for group in groups:  # a group of an older format has no digest
        found = db.execute("SELECT digest FROM row_digests WHERE group_id = ?", (group.group_id,)).fetchone()
        group.row_digest = found[0] if found else ""
    live = [(member, member.state) for group in groups for member in group.members if member.live]
    for member, _ in live:
        _give_up_lease(member)
    return Recovery(
        next_group_id=next_group_id,
        groups=groups,
        version=last_version(db),
        reached=_reached(db),
        unused_group_ids=unused,
        quarantined=_quarantined(db),
        live=live,
    )


def steps_after(db: sqlite3.Connection, version: int) -> list[StepRecord]:
    """In order."""
    rows = db.execute(f"{SELECT_STEPS} WHERE version > ? ORDER BY version", (version,))
    return [to_step(row) for row in rows]


def last_version(db: sqlite3.Connection) -> int:
    """The version of the last committed step; 0 if there is no step."""
    version: int = db.execute("SELECT ifnull(max(version), 0) FROM steps").fetchone()[0]
    return version


def _reached(db: sqlite3.Connection) -> int:
    """The highest id of a group in any step; -1 if there is no step."""
    batches = db.execute("SELECT group_ids FROM steps")
    return max((one for (ids,) in batches for one in msgspec.msgpack.decode(ids)), default=-1)


def newest_checkpoint(
    db: sqlite3.Connection, directory: str, checkpoint_ok: CheckpointOk
) -> CheckpointInfo | None:
    """The newest checkpoint that is `checkpoint_ok`. Recorded paths are relative to `directory`."""
    rows = db.execute(SELECT_CHECKPOINTS).fetchall()
    saved = (to_checkpoint(row, directory) for row in rows)
    return next((info for info in saved if checkpoint_ok(info)), None)


def live_group_ids(db: sqlite3.Connection) -> list[int]:
    """Groups with a member that has not ended, ascending."""
    query = f"SELECT DISTINCT group_id FROM trajectories WHERE state IN {LIVE_STATES} ORDER BY group_id"
    return [row[0] for row in db.execute(query)]


def _quarantined(db: sqlite3.Connection) -> list[str]:
    """Rows with an abandoned trajectory, with which several replicas died."""
    query = (
        "SELECT DISTINCT row_id FROM groups JOIN trajectories USING (group_id)"
        f" WHERE state = '{State.ABANDONED}' ORDER BY row_id"
    )
    return [row[0] for row in db.execute(query)]


def _positions(db: sqlite3.Connection) -> tuple[int, list[int]]:
    used = "SELECT group_id FROM groups UNION SELECT group_id FROM skipped"
    num_used, newest = db.execute(f"SELECT count(*), ifnull(max(group_id), -1) FROM ({used})").fetchone()
    if num_used == newest + 1:
        return newest + 1, []
    seen = {row[0] for row in db.execute(used)}
    return newest + 1, [group_id for group_id in range(newest + 1) if group_id not in seen]


def _give_up_lease(member: Trajectory) -> None:
    if member.state is State.LEASED:
        member.state, member.replica, member.epoch = State.QUEUED, "", 0
