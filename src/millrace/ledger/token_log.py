"""Which tokens of which trajectory are in the file already, so that only new ones are written.

Tokens grow by appending, shrink by a restart, and are final once generation has finished; then a
trajectory's plain chunks become one squeezed chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from millrace.core.types import Trajectory
from millrace.ledger.codec import pack_plain, pack_squeezed, pack_versions

ChunkRow = tuple[int, int, int, bytes, bytes]  # trajectory, start, num_tokens, versions, data


class _Mark(NamedTuple):
    """How far a trajectory is recorded. `last` tells a continuation from a rewrite."""

    num_tokens: int
    squeezed: bool
    last: tuple[int, float, int] | None  # token, log-prob and version at the end; None: all is void


_NOTHING = _Mark(0, False, None)


class TokenLog:
    """Plans chunk rows; the plan counts as recorded only when `confirm` follows."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}
        self._planned: dict[int, _Mark] = {}

    def recorded(self, trajectory: Trajectory) -> None:
        """The present tokens of `trajectory` were read from the file."""
        self._marks[trajectory.trajectory_id] = _mark(trajectory)

    def look_at(self, trajectory: Trajectory) -> None:
        """Notice a restart, even if the tokens grow past the recorded ones before the next plan."""
        mark = self._marks.get(trajectory.trajectory_id, _NOTHING)
        if not _continues(trajectory, mark):
            self._marks[trajectory.trajectory_id] = mark._replace(last=None)

    def plan(self, trajectories: Iterable[Trajectory]) -> tuple[list[tuple[int]], list[ChunkRow]]:
        """(trajectories whose chunks go, rows to insert)."""
        drops: list[tuple[int]] = []
        rows: list[ChunkRow] = []
        self._planned = {}
        for trajectory in trajectories:
            trajectory_id = trajectory.trajectory_id
            mark = self._marks.get(trajectory_id, _NOTHING)
            squeeze = is_final(trajectory) and not mark.squeezed
            start = mark.num_tokens if _continues(trajectory, mark) and not squeeze else 0
            if start == 0 and mark.num_tokens:
                drops.append((trajectory_id,))
            if len(trajectory.tokens) > start:
                rows.append(_chunk(trajectory, start))
            self._planned[trajectory_id] = _mark(trajectory)
        return drops, rows

    def confirm(self, ended: Iterable[int]) -> None:
        """The last plan is in the file; forget trajectories that have `ended`."""
        self._marks.update(self._planned)
        self._planned = {}
        for trajectory_id in ended:
            self._marks.pop(trajectory_id, None)


def is_final(trajectory: Trajectory) -> bool:
    """No token will be added or taken away."""
    return trajectory.finish is not None or not trajectory.live


def _mark(trajectory: Trajectory) -> _Mark:
    num_tokens = len(trajectory.tokens)
    return _Mark(num_tokens, is_final(trajectory), _last(trajectory, num_tokens))


def _continues(trajectory: Trajectory, mark: _Mark) -> bool:
    """Are the recorded tokens a beginning of the present ones, as far as their end can tell?"""
    recorded = mark.num_tokens
    if recorded == 0:
        return True
    return len(trajectory.tokens) >= recorded and mark.last == _last(trajectory, recorded)


def _last(trajectory: Trajectory, num_tokens: int) -> tuple[int, float, int] | None:
    if num_tokens == 0:
        return None
    end = num_tokens - 1
    return trajectory.tokens[end], trajectory.logprobs[end], trajectory.versions[end]


def _chunk(trajectory: Trajectory, start: int) -> ChunkRow:
    tokens, logprobs = trajectory.tokens[start:], trajectory.logprobs[start:]
    versions = trajectory.versions[start:]
    assert len(tokens) == len(logprobs) == len(versions), (trajectory.trajectory_id, start)
    pack = pack_squeezed if is_final(trajectory) else pack_plain
    return trajectory.trajectory_id, start, len(tokens), pack_versions(versions), pack(tokens, logprobs)
