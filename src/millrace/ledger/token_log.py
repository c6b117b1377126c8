"""Knows which tokens of each trajectory are in the file, so that only new tokens are written.

Columns grow by appending, and a restart takes new columns. If the columns are the same object, new tokens
follow the recorded tokens. After the end of generation, plain chunks become one squeezed chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Trajectory
from millrace.ledger.records import ChunkRow, chunk_row, is_final


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
