"""A few trajectories to read: the rows are chosen by SQL, so only those few are loaded."""

from __future__ import annotations

import sqlite3
from enum import StrEnum
from typing import NamedTuple

from millrace.core.types import Prompt, State, Trajectory
from millrace.ledger.records import SELECT_TRAJECTORIES, load_prompt, load_trajectory


class Choice(StrEnum):
    """Which trajectories. Of equal ones, the newest come first."""

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
    """At most `num`. All but NEWEST look at one row of each trajectory. Raises DamageError."""
    chosen = f"SELECT trajectory_id FROM trajectories WHERE {_CHOSEN[choice]} LIMIT ?"
    found = []
    for (trajectory_id,) in db.execute(chosen, (num,)).fetchall():
        row = db.execute(f"{SELECT_TRAJECTORIES} WHERE trajectory_id = ?", (trajectory_id,)).fetchone()
        trajectory = load_trajectory(db, row)
        found.append(Sample(load_prompt(db, trajectory.group_id), trajectory))
    return found
