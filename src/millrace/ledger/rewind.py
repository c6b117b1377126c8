"""Goes back to an earlier version: the later steps are undone, and their trajectories end.

The steps after `version` are deleted. Their trajectories become `rejected`, and so does every live group with
a token that an undone version sampled: those weights are no ancestors of the run's weights any more. Groups
that were skipped or ended stay as they are. The data stream goes on from its position, so no prompt comes
twice.
"""

from __future__ import annotations

import sqlite3

from millrace.core.errors import LedgerError
from millrace.core.types import State
from millrace.ledger.records import load_group
from millrace.ledger.recovery import last_version, live_group_ids
from millrace.ledger.schema import LIVE_STATES


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
