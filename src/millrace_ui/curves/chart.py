"""One chart as SVG. It needs no script and no style, so it is the same on a page and as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import numpy as np

from millrace_ui.curves.curve_lines import LARGEST, Array, Line, extremes
from millrace_ui.drawing import fragments
from millrace_ui.drawing.charts import CHARTS
from millrace_ui.drawing.colours import COLORS, ChartScale, apart
from millrace_ui.drawing.fragments import safe
from millrace_ui.record.steps import Curve

POINTS_MAX = 30
"""A line of at most so many points shows its points, because one point draws no line."""

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 346, 8, 176
POINTS = 500
"""About the most points of a line."""
ROW = 17
"""The height of a line of text in a file."""


def chart(
    title: str,
    lines: Sequence[Line],
    x: tuple[float, float],
    *,
    x_label: str,
    log: bool = False,
    alone: bool = False,
    points: int = POINTS,
) -> str:
    """Lines over one axis from x[0] to x[1], each with its band and with the curve before it was smoothed.
    A logarithmic chart leaves out values that are not above 0. Empty: there is no point.

    `alone`: with the title above, and the labels of several lines below.
    """
    values = [v for line in lines for v in (line.y, line.rough, line.low, line.high) if v is not None]
    every = np.concatenate(values) if values else np.empty(0)
    every = every[every > 0] if log else every
    if not len(every):
        return ""
    across = ChartScale.of(*x)
    up = ChartScale.of(float(every.min()), float(every.max()), log=log, room=0.04)
    drawn = [*zip(lines, colors(), strict=False)]
    shapes = [_band(line, color, across, up, points) for line, (color, _) in drawn if line.low is not None]
    shapes += [
        _line(line, line.rough, f'stroke="{color}" stroke-opacity=".3"', across, up, points)
        for line, (color, _) in drawn
        if line.rough is not None
    ]
    for line, look in drawn:
        hidden = "" if line.joined else ' stroke-opacity="0"'
        shapes.append(_line(line, line.y, _style(*look, label=line.label) + hidden, across, up, points))
        shapes.append(_dots(line, look[0], across, up, points) if line.dots else "")
    head, legend = ROW * alone, len(lines) if alone and len(lines) > 1 else 0
    texts = _text(LEFT, -5, title, "start") * alone + "".join(
        f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{_row(i) - 4}" y2="{_row(i) - 4}" {_style(*look)}/>'
        + _text(LEFT + 30, _row(i), line.label, "start")
        for i, (line, look) in enumerate(drawn[:legend])
    )
    ends = f'data-x="{across.low!r} {across.high!r}" data-y="{up.low!r} {up.high!r}"' + ' data-log="1"' * log
    frame = f'data-frame="{LEFT} {RIGHT} {TOP} {BOTTOM}" data-axis="{x_label}"'
    label = f"{title}: {'; '.join(_said(line) for line in lines if len(line.y))}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-head} {WIDTH} {HEIGHT + head + ROW * legend}" '
        f'role="img" aria-label="{safe(label)}" {ends} {frame} fill="none" '
        f'stroke-width="1.4" stroke-linejoin="round" font-size="11" font-family="system-ui, sans-serif">'
        f"{_grid(across, up, x_label)}{''.join(shapes)}{texts}</svg>"
    )


def colors() -> Iterable[tuple[str, str]]:
    """The colour and the dashes of each line. Dashes tell apart lines of the same colour."""
    return ((COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i in count())


def swatch(index: int) -> str:
    """The colour and the dashes of a line, for a legend on a page."""
    color, dashes = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
    return f'<i style="border-top: 3px {"dashed" if dashes else "solid"} {color}"></i>'


DASHES = ("", "6 3")


def _style(color: str, dashes: str, label: str = "") -> str:
    named = f' data-label="{safe(label)}"' if label else ""
    return f'stroke="{color}"' + (f' stroke-dasharray="{dashes}"' if dashes else "") + named


def _row(index: int) -> int:
    return HEIGHT + ROW * index + 10


def _said(line: Line) -> str:
    return f"{line.label} from {line.y[0]:.3g} to {line.y[-1]:.3g}"


def _line(line: Line, y: Array, style: str, across: ChartScale, up: ChartScale, points: int) -> str:
    shown = y > 0 if up.log else np.isfinite(y)
    x, y = line.x[shown], y[shown]
    places = _places(x, y, across, up, points)
    if len(x) == 1:
        cx, cy = places.split(",")
        return f'<circle cx="{cx}" cy="{cy}" r="2.5" {style}/>'
    return f'<polyline points="{places}" {style}/>' if places else ""


def _dots(line: Line, color: str, across: ChartScale, up: ChartScale, points: int) -> str:
    places = _places(line.x, line.y, across, up, points).split()
    marks = "".join(f"M{place}h0" for place in places)
    return marks and f'<path d="{marks}" stroke="{color}" stroke-width="5" stroke-linecap="round"/>'


def _band(line: Line, color: str, across: ChartScale, up: ChartScale, points: int) -> str:
    assert line.low is not None and line.high is not None
    low = _places(line.x, line.low, across, up, points).split(" ")
    high = _places(line.x, line.high, across, up, points)
    return f'<polygon points="{" ".join([high, *reversed(low)])}" fill="{color}" fill-opacity=".18"/>'


def _places(x: Array, y: Array, across: ChartScale, up: ChartScale, points: int) -> str:
    chosen = extremes(y, points)
    xs = LEFT + across.places(x[chosen]) * (RIGHT - LEFT)
    ys = BOTTOM + up.places(y[chosen]) * (TOP - BOTTOM)
    return " ".join(f"{a:.1f},{b:.2f}" for a, b in zip(xs.tolist(), ys.tolist(), strict=True))


def _grid(across: ChartScale, up: ChartScale, x_label: str) -> str:
    html = []
    for text, place in _marked(up):
        y = BOTTOM + place * (TOP - BOTTOM)
        html.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#808080" stroke-opacity=".25"/>')
        html.append(_text(LEFT - 5, y + 4, text, "end"))
    for text, place in _marked(across):
        anchor = "end" if place > 0.97 else "middle"
        html.append(_text(LEFT + place * (RIGHT - LEFT), BOTTOM + 15, text, anchor))
    html.append(f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="#808080"/>')
    return "".join(html) + _text(RIGHT, BOTTOM + 29, x_label, "end")


def _marked(scale: ChartScale) -> Iterable[tuple[str, float]]:
    marks = scale.marks()
    return zip(apart(marks), scale.places(marks), strict=True)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" '
        f'fill-opacity=".75">{safe(text)}</text>'
    )


POINTS_ONLY = "evaluation"
"""A curve whose label begins so is drawn as points: nothing is known between them."""


def run_charts(
    curves: Mapping[str, Mapping[str, Curve]], x_label: str, points: int = POINTS
) -> dict[str, str]:
    """Each chart that has points, as HTML by its name. `curves`: of each chart the lines by their labels. All
    charts have one axis. A line with more than about `points` shows the least and the largest value of each
    stretch."""
    lines = {name: [line_of(label, one) for label, one in each.items()] for name, each in curves.items()}
    x = across(line for each in lines.values() for line in each)
    charts = {
        one.name: with_legend(one.heading, lines[one.name], x, x_label=x_label, log=one.log, points=points)
        for one in CHARTS
    }
    return {name: html for name, html in charts.items() if html}


def run_cards(charts: Mapping[str, str], *, start: str = "") -> str:
    """`charts`: as `run_charts` returns them. With `start` the id of a chart is `start` and its name, so that
    a live page can replace it."""
    ids = {name: f" id={start}{name}" if start else "" for name in charts}
    return "".join(
        fragments.card(one.heading, one.explanation, f"<div{ids[one.name]}>{charts[one.name]}</div>")
        for one in CHARTS
        if one.name in charts
    )


def across(lines: Iterable[Line]) -> tuple[float, float]:
    """The ends of the axis of these lines."""
    ends = [float(end) for line in lines if len(line.x) for end in (line.x.min(), line.x.max())]
    return min(ends, default=0.0), max(ends, default=1.0)


def with_legend(
    title: str,
    lines: Sequence[Line],
    x: tuple[float, float],
    *,
    x_label: str,
    log: bool = False,
    points: int = POINTS,
) -> str:
    """As `chart`, and above it the labels of several lines. A line without points takes no colour from
    another."""
    drawn = [(i, line.label) for i, line in enumerate(lines) if len(line.x)]
    labels = "".join(f"<span>{swatch(i)} {fragments.safe(label)}</span>" for i, label in drawn)
    legend = f'<p class="legend">{labels}</p>' if len(drawn) > 1 else ""
    svg = chart(title, lines, x, x_label=x_label, log=log, points=points)
    return svg and legend + svg


def line_of(label: str, curve: Curve) -> Line:
    x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
    known = np.isfinite(x) & (np.abs(y) < LARGEST)
    only = label.startswith(POINTS_ONLY)
    return Line(label, x[known], y[known], dots=only or len(x) <= POINTS_MAX, joined=not only)
