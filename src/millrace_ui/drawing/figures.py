"""Records as bokeh plots. A colour has one meaning in all plots. Plots are legible on white and on black.

Every plot draws from a named source. So a live page can replace the data and keep the plot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from html import escape
from itertools import cycle
from typing import Any

from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure

from millrace_ui.drawing import fragments
from millrace_ui.record.steps import Curve
from millrace_ui.record.story import TimelineBar

COLORS = ("#3a86d1", "#e08a00", "#8a6fd1", "#2fa5b5", "#a5714a", "#9a9a1e")
"""Colours of lines. A line is a quantity, a run or a schedule."""
INK = "#808080"  # of axes and texts, on white and on black
WORK, WEIGHTS, TROUBLE, WAITING = "#3d9970", "#c7559b", "#d9534a", "#80808078"
KIND_COLORS = {
    "step": WORK,
    "report": WORK,
    "published": WEIGHTS,
    "staged": WEIGHTS,
    "fetched": WEIGHTS,
    "pulled": WEIGHTS,
    "checkpoint": WEIGHTS,
    "worker_started": WAITING,
    "worker_recovered": TROUBLE,
}
HEIGHT, ROW_HEIGHT = 230, 28
POINTS_MAX = 30
"""A line of at most so many points shows its points, because one point draws no line."""
LABEL_CHARACTERS, ROW_CHARACTERS = 40, 55
"""The most characters of a label in a legend, and of a row of labels."""

LINE: dict[str, Any] = {"line_width": 2, "legend_field": "label"}

Data = dict[str, list[Any]]


def curves_data(lines: Mapping[str, Curve]) -> Data:
    """A row for each line that has points."""
    drawn = [(label, line, color) for (label, line), color in zip(lines.items(), cycle(COLORS)) if line.x]
    return {
        "xs": [[_short(x) for x in line.x] for _, line, _ in drawn],
        "ys": [[_short(y) for y in line.y] for _, line, _ in drawn],
        "label": [_clipped(label) for label, _, _ in drawn],
        "color": [color for _, _, color in drawn],
    }


def points_data(data: Data) -> Data:
    """The points of those lines in `data` that have few points."""
    rows = list(zip(data["xs"], data["ys"], data["label"], data["color"], strict=True))
    few = [
        (*point, label, color)
        for xs, ys, label, color in rows
        if len(xs) <= POINTS_MAX
        for point in zip(xs, ys, strict=True)
    ]
    return {name: [row[i] for row in few] for i, name in enumerate(("x", "y", "label", "color"))}


def curves(name: str, data: Data, x_label: str, digits: str, *, log: bool = False) -> figure:
    """Any number of lines over one axis. `digits` is bokeh's format of the values."""
    plot = _plot(name, x_label, y_axis_type="log" if log else "linear")
    source = ColumnDataSource(data, name=name)
    lines = plot.multi_line("xs", "ys", source=source, line_color="color", **LINE)
    points = ColumnDataSource(points_data(data), name=f"{name} points")
    plot.scatter("x", "y", source=points, color="color", size=6)
    tips = [("curve", "@label"), (x_label, "$snap_x{0,0.[00]}"), ("value", "$snap_y{%.4g}")]
    plot.add_tools(
        HoverTool(tooltips=tips, formatters={"$snap_y": "printf"}, renderers=[lines], line_policy="nearest"),
    )
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]a")
    if not log:
        plot.yaxis.formatter = NumeralTickFormatter(format=digits)
    _style_legend(plot, data["label"])
    return plot


def lanes_data(spans: Iterable[TimelineBar]) -> Data:
    """A bar for each span: thick for work, thin and lower in the row for a transfer of weights."""
    bars = list(spans)
    return {
        "row": [(s.row, _offset(s)) for s in bars],
        "left": [_short(s.start, 7) for s in bars],
        "right": [_short(s.end, 7) for s in bars],
        "height": [0.22 if s.kind in ("pulled", "staged", "fetched", "published") else 0.6 for s in bars],
        "color": [KIND_COLORS[s.kind] for s in bars],
        "alpha": [max(0.06, s.share) for s in bars],
        "label": [s.label for s in bars],
    }


def lanes(name: str, data: Data, rows: list[str], end: float | None = None) -> figure:
    """A timeline with a row for each role, up to minute `end`, or to the last span in `data`."""
    plot = _plot(name, "minutes", y_range=FactorRange(factors=rows[::-1]), height=_rows_height(rows))
    plot.x_range = DataRange1d(range_padding=0) if end is None else Range1d(start=0, end=end)
    source = ColumnDataSource(data, name=name)
    look: dict[str, Any] = {"height": "height", "fill_color": "color", "fill_alpha": "alpha"}
    plot.hbar("row", left="left", right="right", source=source, line_color=None, **look)
    tips = [("what", "@label"), ("from", "@left{0,0.000} min"), ("to", "@right{0,0.000} min")]
    plot.add_tools(HoverTool(tooltips=tips))
    return plot


def shares_data(took_s: Mapping[str, Mapping[str, float]]) -> Data:
    """`took_s`: of each role, the seconds of each kind of work."""
    data: Data = {name: [] for name in ("row", "left", "right", "color", "label")}
    for row, seconds in took_s.items():
        total, left = sum(seconds.values()) or 1.0, 0.0
        for what, spent in seconds.items():
            values = (row, left, left + spent / total, SHARE_COLORS[what], f"{what}: {spent / total:.1%}")
            for key, value in zip(data, values, strict=True):
                data[key].append(value)
            left += spent / total
    return data


SHARE_COLORS = {
    "optimizer steps": WORK,
    "waiting for a batch": WAITING,
    "waiting for answers": WAITING,
    "publishing weights": WEIGHTS,
    "checkpoints": WEIGHTS,
    "decoding": WORK,
    "idle": WAITING,
}


def shares(name: str, data: Data) -> figure:
    """How each role spent its time, as bars that add up to 1."""
    rows = list(dict.fromkeys(data["row"]))
    plot = _plot(
        name, "share of its time", y_range=FactorRange(factors=rows[::-1]), height=_rows_height(rows)
    )
    source = ColumnDataSource(data, name=name)
    plot.hbar("row", left="left", right="right", height=0.6, color="color", source=source)
    plot.add_tools(HoverTool(tooltips=[("role", "@row"), ("share", "@label")]))
    plot.x_range = Range1d(start=0, end=1)
    plot.xaxis.formatter = NumeralTickFormatter(format="0%")
    return plot


def estimates(name: str, intervals: Mapping[str, tuple[float, float] | None], unit: str) -> figure:
    """A bar for each (mean, half width), with the mean as a number and the interval as a line."""
    colors = dict(zip(intervals, cycle(COLORS)))
    known = {row: pair for row, pair in intervals.items() if pair is not None}
    rows = list(known)
    plot = _plot(name, unit, y_range=FactorRange(factors=rows[::-1]), height=_rows_height(rows))
    low, high = ([mean + sign * half for mean, half in known.values()] for sign in (-1, 1))
    means = [mean for mean, _ in known.values()]
    plot.hbar(y=rows, right=means, height=0.6, color=[colors[row] for row in rows])
    plot.segment(x0=low, x1=high, y0=rows, y1=rows, color=INK, line_width=2)
    numbers = [f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}" for mean in means]
    plot.text(
        x=high, y=rows, text=numbers, x_offset=6, text_baseline="middle", text_font_size="13px", color=INK
    )
    plot.x_range = Range1d(start=0, end=1.25 * max(high) or 1.0)
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]a")
    return plot


def bars(name: str, rows: list[str], values: Sequence[float], unit: str) -> figure:
    """A bar for each row, with its value as a number."""
    plot = _plot(name, unit, y_range=FactorRange(factors=rows[::-1]), height=_rows_height(rows))
    plot.hbar(y=rows, right=list(values), height=0.6, color=COLORS[0])
    numbers = [f"{value:,}" for value in values]
    look: dict[str, Any] = {"text_baseline": "middle", "text_font_size": "13px", "text_color": INK}
    plot.text(x=list(values), y=rows, text=numbers, x_offset=6, **look)
    plot.x_range = Range1d(start=0, end=1.2 * max(values, default=0) or 1.0)
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]a")
    return plot


def _rows_height(rows: Sized) -> int:
    return 70 + ROW_HEIGHT * len(rows)


def _plot(name: str, x_label: str, *, height: int = HEIGHT, **named: Any) -> figure:
    named.setdefault("y_range", DataRange1d(only_visible=True))
    plot = figure(
        height=height,
        min_width=200,
        sizing_mode="stretch_width",
        x_axis_label=x_label,
        tools="xpan,xwheel_zoom,reset",
        active_scroll=None,
        toolbar_location="below",  # so that the bar does not cover the newest points
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        name=f"plot {name}",
        **named,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis in plot.axis:
        axis.axis_label_text_color = axis.major_label_text_color = INK
        axis.axis_line_color = axis.major_tick_line_color = INK
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = INK, 0.2
    return plot


def _style_legend(plot: figure, labels: list[str]) -> None:
    """Puts the legend above the plot, in as many columns as fit in a narrow card. One line has no legend."""
    legend = plot.legend[0]
    legend.visible, legend.location = len(labels) > 1, "left"
    legend.orientation, legend.label_text_color = "horizontal", INK
    legend.background_fill_color = legend.border_line_color = None
    legend.label_text_font_size, legend.spacing = "12px", 8
    legend.margin = legend.border_line_width = 0
    legend.ncols = max(1, ROW_CHARACTERS // (max(map(len, labels), default=0) + 5))
    plot.add_layout(legend, "above")


def _offset(span: TimelineBar) -> float:
    return -0.4 if span.kind in ("pulled", "staged", "fetched", "published") else 0.0


def _clipped(label: str) -> str:
    """The end of a long name, because the ends of names differ."""
    return label if len(label) <= LABEL_CHARACTERS else f"…{label[1 - LABEL_CHARACTERS :]}"


def _short(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


SHADES = (1.0, 0.55, 0.8, 0.35)
SHARE_MIN = 0.005
"""A smaller share has no words."""


def time_bars(roles: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]) -> str:
    """`roles`: of each the seconds of each cause. A cause without a colour is waiting. Causes of one colour
    have different shades in a bar."""
    bars = "".join(_bar(role, seconds, colors) for role, seconds in roles.items())
    return f'<div class="spent">{bars}</div>'


def _bar(role: str, seconds: Mapping[str, float], colors: Mapping[str, str]) -> str:
    total = sum(seconds.values()) or 1.0
    parts, words, used = [], [], dict[str, int]()
    for cause, spent in seconds.items():
        color = colors.get(cause, WAITING)
        shade = SHADES[used.get(color, 0) % len(SHADES)]
        used[color] = used.get(color, 0) + 1
        share = spent / total
        look = f"background:{escape(color)};opacity:{shade}"
        name = fragments.safe(f"{cause}: {share:.1%}, {spent:,.1f} s")
        parts.append(f'<i style="width:{100 * share:.2f}%;{look}" title="{name}"></i>')
        if share >= SHARE_MIN:
            words.append(f'<span><i style="{look}"></i> {fragments.safe(f"{cause} {share:.0%}")}</span>')
    legend = f'<p class="quiet">{" ".join(words)}</p>'
    return f"<b>{fragments.safe(role)}</b><div>{''.join(parts)}</div>{legend}"
