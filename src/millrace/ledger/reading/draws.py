"""The draws of a row: each group that the stream of prompts made of it, without tokens."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass

from millrace.core.completion.columns import OBSERVED
from millrace.ledger.codec import version_runs


@dataclass(frozen=True, slots=True)
class Draw:
    """One group of a row. `trained` are the versions that trained on its trajectories. `sampled` are the
    oldest and the newest version of its tokens; None: it has no token. `skipped`: why the row was not taken;
    then there is no trajectory. Means are None without a value."""

    group_id: int
    trained: tuple[int, ...] = ()
    sampled: tuple[int, int] | None = None
    states: tuple[tuple[str, int], ...] = ()
    reward_mean: float | None = None
    tokens_mean: float | None = None
    tokens_max: int | None = None
    skipped: str = ""


def load_draws(db: sqlite3.Connection, row_id: str, first: int, stop: int) -> list[Draw]:
    """Of the groups from `first` up to `stop` those of the row, the newest first. The query reads each of
    these groups, because no index has rows."""
    between = "row_id = ? AND group_id >= ? AND group_id < ?"
    values = row_id, first, stop
    draws = [
        _draw(db, group_id)
        for (group_id,) in db.execute(f"SELECT group_id FROM groups WHERE {between}", values).fetchall()
    ]
    skipped = db.execute(f"SELECT group_id, reason FROM skipped WHERE {between}", values)
    draws += [Draw(group_id, skipped=reason) for group_id, reason in skipped]
    return sorted(draws, key=lambda draw: -draw.group_id)


def groups_end(db: sqlite3.Connection) -> int:
    """One more than the newest group, admitted or skipped."""
    newest = "SELECT ifnull(max(group_id), -1) FROM"
    (end,) = db.execute(f"SELECT 1 + max(({newest} groups), ({newest} skipped))").fetchone()
    return int(end)


def _draw(db: sqlite3.Connection, group_id: int) -> Draw:
    query = (
        "SELECT trajectory_id, state, reward, num_tokens, trained_version FROM trajectories"
        " WHERE group_id = ? ORDER BY trajectory_id"
    )
    rows = db.execute(query, (group_id,)).fetchall()
    rewards = [reward for _, _, reward, _, _ in rows if reward is not None]
    lengths = [num_tokens for _, _, _, num_tokens, _ in rows if num_tokens is not None]
    versions = [
        version
        for trajectory_id, *_ in rows
        for (runs,) in db.execute("SELECT versions FROM chunks WHERE trajectory_id = ?", (trajectory_id,))
        for version, _ in version_runs(runs)
        if version != OBSERVED
    ]
    return Draw(
        group_id,
        trained=tuple(sorted({version for *_, version in rows if version is not None})),
        sampled=(min(versions), max(versions)) if versions else None,
        states=tuple(Counter(state for _, state, *_ in rows).items()),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        tokens_mean=sum(lengths) / len(lengths) if lengths else None,
        tokens_max=max(lengths, default=None),
    )
