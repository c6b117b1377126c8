"""The charts of a page, each with its meaning and a table of its values, and their files."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import cycle

import numpy as np

from millrace.core.errors import DataError
from millrace_ui.curves.chart import POINTS, chart, swatch
from millrace_ui.curves.choices import Band, meaning
from millrace_ui.curves.curve_lines import METRICS_MAX, CurveSet, Line
from millrace_ui.drawing import fragments
from millrace_ui.overview import AXES
from millrace_ui.record.steps import Axis

ROWS_MAX = 16


def cards(curves: CurveSet, files: str = "", points: int = POINTS) -> str:
    """All charts over one axis. `files` is the address of the site; empty: there is none."""
    across = curves.across()
    if across is None:
        return fragments.notice("There is no optimizer step in this range.")
    shown = "".join(_card(curves, name, across, files, points) for name in curves.drawn)
    zoom = ' data-zoom="1"' if curves.choices.by is Axis.STEP and files else ""
    return f'<div class="charts"{zoom}>{shown}</div>'


def _card(curves: CurveSet, name: str, across: tuple[float, float], files: str, points: int) -> str:
    choices, lines = curves.choices, curves.lines(name)
    svg = chart(name, lines, across, x_label=AXES[choices.by], log=choices.log, points=points)
    if not svg:
        kind = "above 0 " if choices.log else ""
        svg = f'<p class="quiet">It has no value {kind}in this range.</p>'
    links = [
        fragments.link(f"{files}{kind}{choices.address(metrics=(name,))}", kind.upper())
        for kind in ("svg", "csv")
    ]
    downloads = f'<p class="files">{" ".join(links)}</p>' if files else ""
    values = f"<details><summary>Values</summary>{_table(curves, lines)}</details>"
    return fragments.card(name, meaning(name), svg + values + downloads)


def _table(curves: CurveSet, lines: Sequence[Line]) -> str:
    """Values at some places of the axis: of each line the last one up to there."""
    every = np.unique(np.concatenate([line.x for line in lines]))
    places = (
        every[np.unique(np.linspace(0, len(every) - 1, ROWS_MAX).round().astype(int))] if len(every) else []
    )
    rows = [(f"{x:,.6g}", *(_cell(line, float(x)) for line in lines)) for x in places]
    return fragments.table((AXES[curves.choices.by], *curves.members), rows)


def _cell(line: Line, x: float) -> str:
    at = int(np.searchsorted(line.x, x, side="right")) - 1
    if at < 0 or x > line.x[-1]:
        return "–"
    if line.low is None or line.high is None or line.num is None:
        return f"{line.y[at]:.4g}"
    return f"{line.y[at]:.4g} ({line.low[at]:.4g} to {line.high[at]:.4g})"


def legend(curves: CurveSet, addresses: Sequence[str] = ()) -> str:
    """The colour of each line, with an address for each or for none."""
    swatches = []
    for i, ((label, runs), address) in enumerate(
        zip(curves.members.items(), addresses or cycle([""]), strict=False)
    ):
        text = fragments.link(address, label) if address else fragments.safe(label)
        count = f" ({len(runs)} run{'s' * (len(runs) > 1)})" if curves.grouped else ""
        swatches.append(f"<span>{swatch(i)} {text}{count}</span>")
    return f'<p class="legend">{"".join(swatches)}</p>'


def notes(curves: CurveSet) -> str:
    """What the lines are, and which choices could not be met."""
    sentences: list[str] = []
    if curves.grouped:
        band = {
            Band.RANGE: "The band goes from the least to the largest run.",
            Band.DEVIATION: "The band is the mean minus and plus the standard deviation of the runs.",
        }
        sentences.append(
            f"A line is the mean of the runs of its group that have come so far. {band[curves.choices.band]}"
        )
    if curves.choices.smooth:
        pale = "" if curves.grouped else " The pale line is not smoothed."
        sentences.append(f"Smoothed: an exponential moving average over the whole run.{pale}")
    if curves.choices.log:
        sentences.append("Values that are not above 0 are left out.")
    why = f"Not measured, or more than {METRICS_MAX}"
    left_out = fragments.notice(f"{why}: {', '.join(curves.left_out)}.") if curves.left_out else ""
    return left_out + (f'<p class="quiet">{fragments.safe(" ".join(sentences))}</p>' if sentences else "")


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
    table.writerow(["curve", AXES[curves.choices.by], _text_cell(name), *(_OPTIONAL[one] for one in given)])
    for line in lines:
        columns = [
            getattr(line, one).tolist() for one in ("x", "y", *given) if getattr(line, one) is not None
        ]
        table.writerows([_text_cell(line.label), *values] for values in zip(*columns, strict=True))
    return out.getvalue()


def _text_cell(text: str) -> str:
    """A text that no program for tables takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
