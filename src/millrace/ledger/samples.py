"""Loads a few trajectories, and the draws of a row: each group that the stream of prompts made of it,
without tokens. SQL chooses the rows, so only the chosen trajectories are loaded.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from millrace.core.completion.columns import OBSERVED
from millrace.core.types import Prompt, State, Trajectory
from millrace.ledger.codec import version_runs
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


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Which trajectories a query may choose. Ranges have both of their ends. None or empty: any. A trajectory
    without a reward is in no range of rewards. One that still grows is in no range of lengths."""

    state: str = ""
    reason: str = ""  # a part of the reason, in any case
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None

    def where(self) -> tuple[str, list[Any]]:
        """SQL that begins with AND, and its values. Empty: the filter lets all through."""
        terms = list(self._terms())
        return "".join(f" AND {term}" for term, _ in terms), [value for _, value in terms]

    def _terms(self) -> Iterator[tuple[str, Any]]:
        if self.state:
            yield "state = ?", self.state
        if self.reason:
            yield "instr(lower(reason), lower(?)) > 0", self.reason
        for term, value in (
            ("reward >= ?", self.reward_min),
            ("reward <= ?", self.reward_max),
            ("num_tokens >= ?", self.tokens_min),
            ("num_tokens <= ?", self.tokens_max),
        ):
            if value is not None:
                yield term, value


ANY = SampleFilter()


_CHOSEN = {
    Choice.NEWEST: ("finish IS NOT NULL", "trajectory_id DESC"),
    Choice.BEST: ("reward IS NOT NULL", "reward DESC, trajectory_id DESC"),
    Choice.WORST: ("reward IS NOT NULL", "reward, trajectory_id DESC"),
    Choice.FAILED: (f"state = '{State.FAILED}'", "trajectory_id DESC"),
}


def load_samples(db: sqlite3.Connection, choice: Choice, num: int, only: SampleFilter = ANY) -> list[Sample]:
    """At most `num` trajectories. All choices but NEWEST, and a filter, read one row of each trajectory.
    Raises DamageError."""
    (chosen, order), (and_only, values) = _CHOSEN[choice], only.where()
    query = f"SELECT trajectory_id FROM trajectories WHERE {chosen}{and_only} ORDER BY {order} LIMIT ?"
    return _load(db, db.execute(query, (*values, num)).fetchall())


def count_samples(db: sqlite3.Connection, choice: Choice, only: SampleFilter) -> int:
    """The number of trajectories that `load_samples` chooses from."""
    and_only, values = only.where()
    query = f"SELECT count(*) FROM trajectories WHERE {_CHOSEN[choice][0]}{and_only}"
    (num,) = db.execute(query, values).fetchone()
    return int(num)


def load_before(
    db: sqlite3.Connection, trajectory_id: int | None, num: int, only: SampleFilter = ANY
) -> list[Sample]:
    """At most `num` trajectories before `trajectory_id`, the newest first. Raises DamageError."""
    and_only, values = only.where()
    query = (
        f"SELECT trajectory_id FROM trajectories WHERE finish IS NOT NULL AND trajectory_id < ?{and_only}"
        " ORDER BY trajectory_id DESC LIMIT ?"
    )
    first = _ID_MAX if trajectory_id is None else trajectory_id
    return _load(db, db.execute(query, (first, *values, num)).fetchall())


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


# ---------------------------------------------------------------- draws of a row


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
