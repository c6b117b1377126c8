"""A simulated run, or several compared, as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean

from millrace.sim.report import svg
from millrace.sim.report.compare import Comparison
from millrace.sim.report.measure import Sample, Timeline

ROWS_MAX = 40
"""Replicas shown on the chart; of more, evenly spaced ones."""
LANE = 12
POINTS = 200

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 980px; margin: 2em auto; color: #222; }
h2 { margin: 1.6em 0 .3em; font-size: 1.15em; } p { margin: .2em 0 .8em; color: #555; }
table { border-collapse: collapse; } td, th { padding: .2em .9em .2em 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid #bbb; }
"""


def page(title: str, compared: Sequence[Comparison], rows: Sequence[Sequence[str]]) -> str:
    """`rows` is the table that the terminal shows, heading first."""
    parts = [f"<h1>{escape(title)}</h1>", _table(rows)]
    parts += _section(
        "Throughput",
        "Trained tokens per second; the line is the 95 % confidence interval over seeds.",
        svg.bars({c.name: _interval(c, "trained_tokens_per_s") for c in compared}, "tok/s"),
    )
    parts += _section(
        "Step time",
        "Seconds from one optimizer step to the next.",
        svg.bars({c.name: _interval(c, "step_s") for c in compared}, "s"),
    )
    parts += _section(
        "Staleness",
        "Share of trained tokens by how many optimizer steps old they were (first seed).",
        svg.columns({c.name: c.results[0].staleness for c in compared}),
    )
    parts += _section(
        "KV cache",
        "Mean fraction of the replicas' KV in use over time (first seed).",
        svg.lines({c.name: _over_time(c.timeline, "kv") for c in compared}),
    )
    parts += _section(
        "Trajectories running",
        "All replicas together (first seed).",
        svg.lines({c.name: _over_time(c.timeline, "running", total=True) for c in compared}),
    )
    for comparison in compared:
        parts += _section(
            f"Who does what: {comparison.name}",
            "Trainer: its steps, and dark its publishes. Replicas: coloured by the version they serve, the "
            "paler the idler; a dark tick is a change of weights.",
            gantt(comparison.timeline),
        )
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def gantt(timeline: Timeline) -> str:
    """A lane for the trainer, and one for each replica shown."""
    names = _spread(sorted(timeline.samples, key=_by_number))
    ends = [span.end_s for span in timeline.trainer] + [row[-1].time_s for row in timeline.samples.values()]
    scale = svg.Scale(0.0, max(ends, default=1.0))
    drawing = svg.Drawing(LANE * len(names) + 62)
    drawing.text(svg.MARGIN - 8, 18, "trainer", anchor="end")
    drawing.rect(svg.MARGIN, 5, svg.WIDTH - svg.MARGIN - svg.RIGHT, 18, svg.IDLE)
    for span in timeline.trainer:
        color = svg.color(span.version) if span.what == "step" else svg.INK
        title = f"{span.what} {span.version}: {span.end_s - span.start_s:.1f} s"
        drawing.rect(scale(span.start_s), 5, scale(span.end_s) - scale(span.start_s), 18, color, title=title)
    lanes = {name: 32 + LANE * index for index, name in enumerate(names)}
    for name, y in lanes.items():
        drawing.text(svg.MARGIN - 8, y + 9, name, anchor="end", color="#777")
        _lane(drawing, scale, y, timeline.samples[name])
    for name, span in timeline.pulls:
        if name in lanes:
            width = scale(span.end_s) - scale(span.start_s)
            title = f"version {span.version}"
            drawing.rect(scale(span.start_s), lanes[name], max(width, 1.0), LANE - 2, svg.INK, title=title)
    svg.seconds_axis(drawing, scale, 32 + LANE * len(names) + 16)
    return str(drawing)


def _lane(drawing: svg.Drawing, scale: svg.Scale, y: float, row: Sequence[Sample]) -> None:
    """Neighbouring reports that look alike are one rectangle."""
    start_s = 0.0
    for index, sample in enumerate(row):
        ahead = row[index + 1] if index + 1 < len(row) else None
        if ahead is not None and _look(ahead) == _look(sample):
            continue
        version, shade = _look(sample)
        idle = version < 0 or not shade
        drawing.rect(
            scale(start_s),
            y,
            scale(sample.time_s) - scale(start_s),
            LANE - 2,
            svg.IDLE if idle else svg.color(version),
            title=f"version {sample.version}, {sample.running} running, KV {sample.kv:.0%}",
            opacity=1.0 if idle else 0.2 + 0.2 * shade,
        )
        start_s = sample.time_s


def _look(sample: Sample) -> tuple[int, int]:
    return sample.version, round(4 * sample.busy)


def _by_number(name: str) -> tuple[int, str]:
    digits = name.rpartition("-")[2]
    return (int(digits) if digits.isdigit() else 0, name)


def _spread(names: Sequence[str]) -> list[str]:
    if len(names) <= ROWS_MAX:
        return list(names)
    return [names[round(i * (len(names) - 1) / (ROWS_MAX - 1))] for i in range(ROWS_MAX)]


def _over_time(timeline: Timeline, what: str, *, total: bool = False) -> list[tuple[float, float]]:
    """A quantity of all replicas, in `POINTS` equal intervals of time."""
    samples = [s for row in timeline.samples.values() for s in row]
    end_s = max((s.time_s for s in samples), default=1.0)
    bins: list[list[float]] = [[] for _ in range(POINTS + 1)]
    for sample in samples:
        bins[int(POINTS * sample.time_s / end_s)].append(float(getattr(sample, what)))
    factor = len(timeline.samples) if total else 1
    return [(end_s * i / POINTS, factor * fmean(values)) for i, values in enumerate(bins) if values]


def _interval(comparison: Comparison, quantity: str) -> tuple[float, float]:
    estimate = comparison.estimate(quantity)
    return estimate.mean, estimate.half_width


def _section(title: str, about: str, drawing: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", f"<p>{escape(about)}</p>", drawing]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"
