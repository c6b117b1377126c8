"""One curve as a file: a chart as SVG, or all points in the range as CSV."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from io import StringIO

from millrace.core.errors import DataError
from millrace_ui.curves.chart import chart
from millrace_ui.curves.curve_set import CurveSet
from millrace_ui.overview import AXES

TYPES = {"svg": "image/svg+xml", "csv": "text/csv"}
_OPTIONAL = {"rough": "not smoothed", "low": "low", "high": "high", "num": "runs"}


@dataclass(frozen=True, slots=True)
class CurveFile:
    name: str
    content_type: str
    content: bytes


def curve_file(curves: CurveSet, kind: str) -> CurveFile:
    """`kind`: a key of `TYPES`. Raises DataError: the choices name no metric that is measured, or no point is
    in their range."""
    if not curves.choices.metrics or not curves.drawn:
        raise DataError(
            f"name one metric that is measured, not {', '.join(curves.choices.metrics) or 'none'}"
        )
    name = curves.drawn[0]
    text = _csv(curves, name) if kind == "csv" else _svg(curves, name)
    parts = [*curves.members, name] if len(curves.members) == 1 else [name]
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")[-100:]
    return CurveFile(
        f"{stem or 'curve'}.{kind}", f"{TYPES[kind]}; charset=utf-8", text.encode(errors="replace")
    )


def _svg(curves: CurveSet, name: str) -> str:
    choices, across = curves.choices, curves.across() or (0.0, 1.0)
    text = chart(name, curves.lines(name), across, x_label=AXES[choices.by], log=choices.log, alone=True)
    if not text:
        raise DataError(f"{name} has no value to draw in this range")
    return text


def _csv(curves: CurveSet, name: str) -> str:
    lines, out = curves.lines(name), StringIO()
    given = [one for one in _OPTIONAL if any(getattr(line, one) is not None for line in lines)]
    table = csv.writer(out)
    table.writerow(["curve", AXES[curves.choices.by], _cell(name), *(_OPTIONAL[one] for one in given)])
    for line in lines:
        columns = [
            getattr(line, one).tolist() for one in ("x", "y", *given) if getattr(line, one) is not None
        ]
        table.writerows([_cell(line.label), *values] for values in zip(*columns, strict=True))
    return out.getvalue()


def _cell(text: str) -> str:
    """A text that no program for tables takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
