"""Evaluations of a run's models, as points beside the curve of rewards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import msgspec

from millrace.core.errors import DataError
from millrace.look.steps import Axis, Curve, Steps


class _Line(msgspec.Struct):
    version: int
    reward_mean: float | None


def evaluated(path: Path, steps: Steps, by: Axis) -> Curve:
    """Mean reward of each version that was evaluated, as last evaluated. Raises DataError: a damaged line."""
    if not path.exists():
        return Curve([], [])
    try:
        lines = [msgspec.json.decode(line, type=_Line) for line in path.read_bytes().splitlines()]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: a line is damaged: {error}") from error
    known = sorted({one.version: one.reward_mean for one in lines if one.reward_mean is not None}.items())
    axis = steps.axis(by)
    return Curve([_place(steps.versions, axis, version) for version, _ in known], [y for _, y in known])


def _place(versions: Sequence[int], axis: Sequence[float], version: int) -> float:
    """Of the last step up to `version`; 0 before the first."""
    done = bisect_right(versions, version)
    return axis[done - 1] if done else 0.0
