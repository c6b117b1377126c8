"""Measurements of each step by column. They are read from `metrics.jsonl` as the file grows."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.core.errors import DataError, boundary
from millrace.observe.sinks.log_files import Tail

POINTS = 500
"""Points of a curve. A longer curve is drawn as means of neighbours."""

COLUMNS_MAX, VALUES_MAX = 4096, 1 << 26
"""The most values of all columns together are 512 MiB."""

GAP = "logprob_gap/"

Array = npt.NDArray[np.float64]

_DECODER = msgspec.json.Decoder(dict[str, Any])


class Axis(StrEnum):
    """The x axis of curves."""

    STEP = "step"
    TOKENS = "tokens"  # trained so far
    TIME = "time"  # minutes since the run's first step


@dataclass(frozen=True, slots=True)
class Curve:
    x: list[float]
    y: list[float]


class Steps:
    """Columns of `metrics.jsonl`, one value a step; NaN where a step has none. `update` reads what is new.

    A step that the run repeated after a crash has its last values. Steps that a rewind undid are gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._tail = Tail(self._path)
        self._damage = ""  # the message of every later `update`
        self.versions = array("q")
        self._columns: dict[str, array[float]] = {}

    def update(self) -> None:
        """Raises DataError: a line is damaged."""
        if self._tail.is_lost:
            self._begin()  # another run took its place
        if self._damage:
            raise DataError(self._damage)
        for lines in iter(self._tail.take, []):
            line = b""
            try:
                with boundary(str(self._path), "not a whole step", DataError):
                    for line in lines:
                        self._add(_DECODER.decode(line))
            except DataError as error:
                self._damage = f"{error} in {line[:80]!r}"
                raise DataError(self._damage) from error

    def __len__(self) -> int:
        return len(self.versions)

    def names(self, start: str = "") -> list[str]:
        return [name for name in self._columns if name.startswith(start)]

    def column(self, name: str) -> Sequence[float]:
        return self._columns.get(name) or array("d", [nan]) * len(self)

    def last(self, name: str) -> float | None:
        """The newest value that is a number."""
        return next((value for value in reversed(self.column(name)) if isfinite(value)), None)

    def curve(self, name: str, by: Axis = Axis.STEP, points: int = POINTS) -> Curve:
        return curve(self.axis(by), self.column(name), points)

    def axis(self, by: Axis) -> Array:
        match by:
            case Axis.STEP:
                return np.array(self.versions, float)
            case Axis.TOKENS:
                tokens = np.array(self.column("tokens/trained"))
                return np.cumsum(np.where(np.isfinite(tokens), tokens, 0.0))
            case Axis.TIME:
                return self.minutes()

    def minutes(self) -> Array:
        """Minutes since the first step. A pause between two sessions counts."""
        walls = np.array(self.column("wall_s"))
        return (walls - walls[:1]) / 60

    def _add(self, line: dict[str, Any]) -> None:
        version, replayed = line.pop("version"), line.pop("replayed", False)
        values = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        at = bisect_left(self.versions, version)
        if at < len(self.versions) and not replayed:
            self._cut(at)
        if at == len(self.versions):
            self.versions.append(version)
            for name, column in self._columns.items():
                column.append(values.pop(name, nan))
        for name, value in values.items():
            if name not in self._columns:
                self._columns[name] = array("d", [nan]) * len(self.versions)
            self._columns[name][at] = value
        self._refuse_many()

    def _refuse_many(self) -> None:
        """Bound the memory: one short line can add a value to every column."""
        columns = len(self._columns)
        if columns > COLUMNS_MAX or columns * len(self) > VALUES_MAX:
            raise DataError(f"{columns:,} columns of {len(self):,} steps are more than any run writes")

    def _cut(self, at: int) -> None:
        del self.versions[at:]
        for column in self._columns.values():
            del column[at:]


def curve(x: npt.ArrayLike, y: npt.ArrayLike, points: int | None = POINTS) -> Curve:
    """At most `points` points, which are means of neighbours; None: all. A value that is not finite is left
    out."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    known = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[known], ys[known]
    width = 1 if points is None else -(-len(xs) // points)
    if width > 1:
        starts = np.arange(0, len(xs), width)
        nums = np.minimum(width, len(xs) - starts)
        xs, ys = np.add.reduceat(xs, starts) / nums, np.add.reduceat(ys, starts) / nums
    return Curve(xs.tolist(), ys.tolist())


def over(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Quotients; NaN where the divisor is 0."""
    return [a / b if b else nan for a, b in zip(above, below, strict=True)]


def added(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def gap_staleness(name: str) -> float:
    """The staleness in a column's name: 2 of `logprob_gap/2/mean`."""
    middle = name.removeprefix(GAP).partition("/")[0]
    return float(middle) if middle.isdigit() else inf
