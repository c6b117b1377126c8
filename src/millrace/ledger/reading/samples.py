"""Loads a few trajectories. SQL chooses the rows, so only the chosen trajectories are loaded."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from millrace.core.types import Prompt, State, Trajectory
from millrace.ledger.records import SELECT_TRAJECTORIES, load_prompt, load_trajectory


class Choice(StrEnum):
    """A choice of trajectories. Of equal trajectories, the newest come first."""

    NEWEST = "newest"  # of those whose generation has ended
    BEST = "best"  # highest rewards
    WORST = "worst"  # lowest rewards
    FAILED = "failed"  # newest of those whose environment or reward raised


class Sample(NamedTuple):
    prompt: Prompt
    trajectory: Trajectory  # with its tokens


_CHOSEN = {
    Choice.NEWEST: "finish IS NOT NULL ORDER BY trajectory_id DESC",
    Choice.BEST: "reward IS NOT NULL ORDER BY reward DESC, trajectory_id DESC",
    Choice.WORST: "reward IS NOT NULL ORDER BY reward, trajectory_id DESC",
    Choice.FAILED: f"state = '{State.FAILED}' ORDER BY trajectory_id DESC",
}


def load_samples(db: sqlite3.Connection, choice: Choice, num: int) -> list[Sample]:
    """At most `num` trajectories. All choices but NEWEST read one row of each trajectory. Raises
    DamageError."""
    chosen = f"SELECT trajectory_id FROM trajectories WHERE {_CHOSEN[choice]} LIMIT ?"
    return _load(db, db.execute(chosen, (num,)).fetchall())


def load_before(db: sqlite3.Connection, trajectory_id: int | None, num: int) -> list[Sample]:
    """At most `num` trajectories before `trajectory_id`, the newest first. Raises DamageError."""
    chosen = (
        "SELECT trajectory_id FROM trajectories WHERE finish IS NOT NULL AND trajectory_id < ?"
        " ORDER BY trajectory_id DESC LIMIT ?"
    )
    first = _ID_MAX if trajectory_id is None else trajectory_id
    return _load(db, db.execute(chosen, (first, num)).fetchall())


def load_of_groups(
    db: sqlite3.Connection, part: tuple[float, float], num: int, *, paid: bool
) -> list[Sample]:
    """At most `num` trajectories, evenly spread over this part of the run ((0, 1): all of it), one of a
    group: the one with the highest reward, if it is above 0. Without `paid` the one with the lowest, if it is
    at most half of the highest reward of the part. Raises DamageError."""
    (last,) = db.execute("SELECT ifnull(max(trajectory_id), 0) FROM trajectories").fetchone()
    bounds = [int(share * (last + 1)) for share in part]
    best = "SELECT trajectory_id, max(reward) AS best FROM {} GROUP BY group_id HAVING best > 0"
    worst = "SELECT trajectory_id, min(reward) AS worst FROM {0} GROUP BY group_id HAVING worst <= 0.5 *"
    worst += " (SELECT max(reward) FROM {0})"
    of_part = "(SELECT * FROM trajectories WHERE trajectory_id >= ?1 AND trajectory_id < ?2)"
    rows = db.execute(f"{best if paid else worst}".format(of_part), bounds).fetchall()
    step = max(1, len(rows) // num)
    return _load(db, [row[:1] for row in rows[::step][:num]])


def _load(db: sqlite3.Connection, ids: Sequence[tuple[int]]) -> list[Sample]:
    samples, prompts = [], dict[int, Prompt]()
    for (trajectory_id,) in ids:
        row = db.execute(f"{SELECT_TRAJECTORIES} WHERE trajectory_id = ?", (trajectory_id,)).fetchone()
        trajectory = load_trajectory(db, row)
        group_id = trajectory.group_id
        if group_id not in prompts:
            prompts[group_id] = load_prompt(db, group_id)
        samples.append(Sample(prompts[group_id], trajectory))
    return samples


_ID_MAX = 2**63 - 1
