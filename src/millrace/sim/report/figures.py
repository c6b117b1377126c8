"""The plots of a simulated run: one colour for each schedule, grey for work, magenta for moving weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range,
    Range1d,
)
from bokeh.models.text import BaseText
from bokeh.plotting import figure

from millrace.sim.report.compare import Interval
from millrace.sim.report.measure import Sample, Timeline

SCHEDULE_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#8c564b")
WORK_COLOR, WEIGHTS_COLOR, GROUND_COLOR = "#333333", "#c51b7d", "#f2f2f2"
POINTS = 200
"""Points of a curve."""
WIDTH = 960
ZOOM = "xpan,xwheel_zoom,reset"


def estimates(found: Mapping[str, Interval], unit: str) -> figure:
    """A bar for each schedule, with the mean in figures and a line as long as the interval."""
    names = list(found)
    plot = _plot(60 + 34 * len(names), unit, FactorRange(factors=names[::-1]))
    means, halves = [one.mean for one in found.values()], [one.half_width for one in found.values()]
    low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
    plot.hbar(y=names, right=means, height=0.6, color=_colors(len(names)))
    plot.segment(x0=low, x1=high, y0=names, y1=names, color=WORK_COLOR, line_width=2)
    texts = [f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}" for mean in means]
    plot.text(x=high, y=names, text=texts, x_offset=6, text_baseline="middle", text_font_size="13px")
    plot.x_range = Range1d(start=0, end=1.12 * max(high) or 1.0)
    return plot


def histograms(shares: Mapping[str, Mapping[int, float]]) -> figure:
    """Bars side by side: the share of trained tokens at each staleness."""
    plot = _plot(280, "staleness (optimizer steps)", DataRange1d(start=0))
    plot.add_tools(HoverTool(tooltips=[("staleness", "@at"), ("share", "@share{0.0%}")]))
    width = 0.8 / len(shares)
    for index, (name, color) in enumerate(zip(shares, _colors(len(shares)), strict=True)):
        at = list(shares[name])
        x = [place - 0.4 + width * (index + 0.5) for place in at]
        source = ColumnDataSource({"x": x, "at": at, "share": list(shares[name].values())})
        plot.vbar("x", top="share", width=width, source=source, color=color, legend_label=name)
    plot.xaxis.ticker = FixedTicker(ticks=sorted({at for row in shares.values() for at in row}))
    return _finished(plot, "share of trained tokens", "0%")


def curves(timelines: Mapping[str, Timeline], what: str, label: str, digits: str, *, total: bool) -> figure:
    """A quantity of all replicas over time: their mean, or `total`, their sum."""
    plot = _plot(280, "time (s)", DataRange1d(start=0), tools=ZOOM)
    for (name, timeline), color in zip(timelines.items(), _colors(len(timelines)), strict=True):
        points = _over_time(timeline, what, len(timeline.samples) if total else 1)
        x, y = np.array(points, np.float32).reshape(-1, 2).T
        plot.line(x, y, color=color, line_width=2, legend_label=name)
    return _finished(plot, label, digits)


def lanes(timeline: Timeline, num_replicas: int) -> figure:
    """Who did what when: a lane for the trainer, and for `num_replicas` evenly spaced replicas."""
    names = _spread(sorted(timeline.samples, key=_by_number), num_replicas)
    rows = {name: float(len(names) - 1 - index) for index, name in enumerate(names)}
    top = len(names) + 0.5
    plot = _plot(110 + 14 * len(names), "time (s)", DataRange1d(), tools=ZOOM)
    plot.background_fill_color = GROUND_COLOR
    plot.yaxis.ticker = FixedTicker(ticks=[*rows.values(), top])
    labels: dict[float | str, str | BaseText] = {top: "trainer", **{row: name for name, row in rows.items()}}
    plot.yaxis.major_label_overrides = labels
    work = [
        (start_s, sample.time_s, rows[name], sample.version, sample.running, sample.kv, sample.busy)
        for name in names
        for start_s, sample in _merged(timeline.samples[name])
        if sample.busy
    ]
    fields = ("left", "right", "y", "version", "running", "kv", "busy")
    told = [("version", "@version"), ("running", "@running"), ("KV used", "@kv{0%}"), ("busy", "@busy{0%}")]
    _bars(plot, fields, work, told, height=0.8, fill_alpha="busy", color=WORK_COLOR, line_alpha=0)
    told = [("version", "@version"), ("from", "@left{0,0.0} s"), ("to", "@right{0,0.0} s")]
    for what, color in (("step", WORK_COLOR), ("publish", WEIGHTS_COLOR)):
        spans = [(s.start_s, s.end_s, top, s.version) for s in timeline.trainer if s.what == what]
        _bars(plot, fields[:4], spans, told, height=1.4, color=color)
    swaps = [(s.start_s, s.end_s, rows[name], s.version) for name, s in timeline.pulls if name in rows]
    _bars(plot, fields[:4], swaps, told, height=0.8, color=WEIGHTS_COLOR)
    return plot


def _plot(height: int, x_label: str, y_range: Range, *, tools: str = "") -> figure:
    plot = figure(width=WIDTH, height=height, x_axis_label=x_label, y_range=y_range, tools=tools)
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.toolbar.logo = None
    return plot


def _bars(
    plot: figure,
    fields: Sequence[str],
    rows: Sequence[tuple[float, ...]],
    told: list[tuple[str, str]],
    **look: Any,
) -> None:
    """Horizontal bars that tell of themselves under the pointer."""
    columns = np.array(rows, np.float32).reshape(-1, len(fields)).T
    source = ColumnDataSource(dict(zip(fields, columns, strict=True)))
    drawn = plot.hbar("y", left="left", right="right", source=source, **look)
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=told))


def _merged(samples: Sequence[Sample]) -> Iterator[tuple[float, Sample]]:
    """Neighbouring reports that look alike as one: (start, the last of them), `busy` in quarters."""
    start_s = 0.0
    looks = [(sample.version, round(4 * sample.busy)) for sample in samples]
    for sample, look, ahead in zip(samples, looks, [*looks[1:], None], strict=True):
        if look != ahead:
            yield start_s, replace(sample, busy=look[1] / 4)
            start_s = sample.time_s


def _over_time(timeline: Timeline, what: str, factor: float) -> list[tuple[float, float]]:
    """`factor` times the mean over replicas, in `POINTS` equal intervals of time."""
    samples = [s for row in timeline.samples.values() for s in row]
    end_s = max((s.time_s for s in samples), default=1.0)
    bins: list[list[float]] = [[] for _ in range(POINTS + 1)]
    for sample in samples:
        bins[int(POINTS * sample.time_s / end_s)].append(float(getattr(sample, what)))
    return [(end_s * i / POINTS, factor * fmean(values)) for i, values in enumerate(bins) if values]


def _finished(plot: figure, label: str, digits: str) -> figure:
    plot.yaxis.axis_label, plot.yaxis.formatter = label, NumeralTickFormatter(format=digits)
    plot.legend.orientation, plot.legend.click_policy = "horizontal", "hide"
    plot.add_layout(plot.legend[0], "above")
    return plot


def _colors(count: int) -> list[str]:
    return list(islice(cycle(SCHEDULE_COLORS), count))


def _by_number(name: str) -> tuple[int, str]:
    digits = name.rpartition("-")[2]
    return (int(digits) if digits.isdigit() else 0, name)


def _spread(names: Sequence[str], count: int) -> list[str]:
    if len(names) <= count:
        return list(names)
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]
