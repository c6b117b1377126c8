"""The charts on the page of one run. They are SVG, so they are there without a script."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from millrace_ui.curves.chart import POINTS, chart, swatch
from millrace_ui.curves.curve_lines import LARGEST, Line
from millrace_ui.drawing import fragments
from millrace_ui.drawing.charts import CHARTS, Chart
from millrace_ui.drawing.figures import POINTS_MAX
from millrace_ui.record.steps import Curve

POINTS_ONLY = "evaluation"
"""A curve whose label begins so is drawn as points: nothing is known between them."""


def run_charts(
    curves: Mapping[str, Mapping[str, Curve]], x_label: str, points: int = POINTS
) -> dict[str, str]:
    """Each chart that has points, as HTML by its name. `curves`: of each chart the lines by their labels. All
    charts have one axis. A line with more than about `points` shows the least and the largest value of each
    stretch."""
    lines = {name: [_line(label, one) for label, one in each.items()] for name, each in curves.items()}
    ends = [
        end for each in lines.values() for one in each if len(one.x) for end in (one.x.min(), one.x.max())
    ]
    across = (float(min(ends, default=0.0)), float(max(ends, default=1.0)))
    charts = {one.name: _drawn(one, lines[one.name], across, x_label, points) for one in CHARTS}
    return {name: html for name, html in charts.items() if html}


def run_cards(charts: Mapping[str, str], *, start: str = "") -> str:
    """`charts`: as `run_charts` returns them. With `start` the id of a chart is `start` and its name, so that
    a live page can replace it."""
    return "".join(
        f'<section class="chart"><h2>{fragments.safe(one.heading)}</h2>{fragments.explained(one.explanation)}'
        f"<div{f' id={start}{one.name}' if start else ''}>{charts[one.name]}</div></section>"
        for one in CHARTS
        if one.name in charts
    )


def _drawn(one: Chart, lines: list[Line], across: tuple[float, float], x_label: str, points: int) -> str:
    """Empty: there is no point. A line without points takes no colour from another."""
    drawn = [(i, line.label) for i, line in enumerate(lines) if len(line.x)]
    labels = "".join(f"<span>{swatch(i)} {fragments.safe(label)}</span>" for i, label in drawn)
    legend = f'<p class="legend">{labels}</p>' if len(drawn) > 1 else ""
    svg = chart(one.heading, lines, across, x_label=x_label, log=one.log, points=points)
    return svg and legend + svg


def _line(label: str, curve: Curve) -> Line:
    x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
    known = np.isfinite(x) & (np.abs(y) < LARGEST)
    only = label.startswith(POINTS_ONLY)
    return Line(label, x[known], y[known], dots=only or len(x) <= POINTS_MAX, joined=not only)
