"""Measurements of each step by column, read while `metrics.jsonl` grows, and evaluations beside them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import DataError, boundary
from millrace.estimates.evaluation import figure
from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.log_files import Tail
from millrace.run_directory.run_directory import RunDirectory

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


ROWS_MAX = 20


class _Line(msgspec.Struct):
    version: int
    reward_mean: float | None


def evaluated(path: Path, steps: Steps, by: Axis) -> Curve:
    """Mean reward of each evaluated version, by its last evaluation. Raises DataError: a damaged line."""
    if not path.exists():
        return Curve([], [])
    with boundary(str(path), "a line is damaged", DataError):
        lines = [msgspec.json.decode(line, type=_Line) for line in files.read(path).splitlines()]
    known = sorted({one.version: one.reward_mean for one in lines if one.reward_mean is not None}.items())
    axis = steps.axis(by)
    return Curve([_place(steps.versions, axis, version) for version, _ in known], [y for _, y in known])


def while_training(
    evaluations: Mapping[tuple[str, int], Mapping[str, Any]], by: Mapping[str, str], steps: Steps, axis: Axis
) -> dict[str, Curve]:
    """A curve for each evaluation, of the figure that `by` names for it.

    `evaluations` has the newest event of each (evaluation, version)."""
    curves: dict[str, Curve] = {}
    x = steps.axis(axis)
    for (name, version), fields in sorted(evaluations.items()):
        kind = by.get(name, "greedy")
        value = figure(fields["metrics"], kind) if "metrics" in fields else None
        if value is not None:
            curve = curves.setdefault(_label(name, kind), Curve([], []))
            curve.x.append(_place(steps.versions, x, version))
            curve.y.append(value)
    return curves


def newest_figures(run: RunDirectory, config: Config) -> dict[str, float]:
    """Of each evaluation while training: the figure by which it goes, of the newest version that has one.
    Raises: LedgerError."""
    if not config.evaluations or not run.ledger.exists():
        return {}
    by = {section.name: section.by for section in config.evaluations}
    with LedgerReader(run.ledger, check=False) as reader:
        done = sorted((one for one in reader.evaluations() if not one.reason), key=lambda one: one.version)
    figures = ((one.name, by.get(one.name, "greedy"), one.metrics) for one in done)
    named = ((_label(name, kind), figure(metrics, kind)) for name, kind, metrics in figures)
    return {label: value for label, value in named if value is not None}


def _label(name: str, kind: str) -> str:
    return f"evaluation {name}: {kind}"


_HEAD = ("evaluation", "version", "greedy", "interval of 95 %", "samples", "pass@k", "majority@k", "skipped")


def table_of(
    evaluations: Mapping[tuple[str, int], Mapping[str, Any]],
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Head and rows of a table, the newest version first. No column is without any value."""
    newest = sorted(evaluations.items(), key=lambda item: item[0][1], reverse=True)
    rows = [(name, str(version), *_cells(fields)) for (name, version), fields in newest[:ROWS_MAX]]
    kept = [at for at in range(len(_HEAD)) if any(row[at] for row in rows)]
    return [_HEAD[at] for at in kept], [tuple(row[at] for at in kept) for row in rows]


def _cells(fields: Mapping[str, Any]) -> tuple[str, ...]:
    if "metrics" not in fields:
        return "", "", "", "", "", fields["reason"]
    metrics, k = fields["metrics"], str(fields["metrics"]["num_samples"])
    low, high = metrics["intervals"].get("greedy_accuracy", (None, None))
    between = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
    shown = (metrics["greedy_accuracy"], metrics["pass_at_k"].get(k), metrics["majority_at_k"].get(k))
    greedy, passes, votes = ("" if value is None else f"{value:.3f}" for value in shown)
    return greedy, between, "" if k == "0" else k, passes, votes, ""


def _place(versions: Sequence[int], axis: Array, version: int) -> float:
    """The axis' value at the last step up to `version`; 0 before the first step."""
    done = bisect_right(versions, version)
    return float(axis[done - 1]) if done else 0.0
