"""Evaluations of a run's models, as points beside the curve of rewards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import DataError, boundary
from millrace.estimates.evaluation import figure
from millrace.ledger.reading.reader import LedgerReader
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.record.steps import Array, Axis, Curve, Steps

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
