"""Bars as HTML, without a script: timelines, shares of time, amounts. A colour has one meaning everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle

from millrace_ui.drawing import fragments
from millrace_ui.drawing.colours import COLORS, ChartScale
from millrace_ui.record.story import TimelineBar

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
TRANSFERS = ("pulled", "staged", "fetched", "published")
"""Of weights. Their bars are thin and lower in the row, because work goes on meanwhile."""
SHARE_COLORS = {
    "optimizer steps": WORK,
    "waiting for a batch": WAITING,
    "waiting for answers": WAITING,
    "publishing weights": WEIGHTS,
    "checkpoints": WEIGHTS,
    "decoding": WORK,
    "idle": WAITING,
}

ZOOMS = (1, 8, 64)
"""How many times wider than its place a timeline can be. `page.css` has a rule for each."""
MARKS = 5
"""About so many numbers stand below a timeline in each width of its place."""


def timeline(spans: Iterable[TimelineBar], rows: Sequence[str], end: float | None = None) -> str:
    """A row for each role, from minute 0 to `end`; None: from the first of the spans to the last."""
    bars = list(spans)
    if not bars:
        return '<p class="quiet">Nothing is done yet.</p>'
    first, last = min(bar.start for bar in bars), max(bar.end for bar in bars)
    across = ChartScale.of(first, last) if end is None else ChartScale.of(0.0, end)
    of_row = {row: "".join(_span(bar, across) for bar in bars if bar.row == row) for row in rows}
    lanes = "".join(
        f'<div class="lane"><b>{fragments.safe(row)}</b><div>{html}</div></div>'
        for row, html in of_row.items()
    )
    return f"<div>{lanes}{''.join(_marks(across, zoom) for zoom in ZOOMS)}</div>"


def timeline_card(heading: str, explanation: str, drawn: str, name: str = "") -> str:
    """`drawn` by `timeline`, with a choice of its zoom. A live page replaces what `name` has."""
    options = "".join(f'<option value="{zoom}">{zoom} ×</option>' for zoom in ZOOMS)
    zoom = f'<label class="quiet">Zoom <select autocomplete="off">{options}</select></label>'
    place = f' id="{escape(name)}"' if name else ""
    lanes = f'<div class="timeline"{place}>{drawn}</div>'
    return fragments.card(heading, explanation, zoom + lanes, whole=True)


def _span(bar: TimelineBar, across: ChartScale) -> str:
    left, right = (100 * place for place in across.places([bar.start, bar.end]).tolist())
    look = f"left:{left:.6g}%;width:{right - left:.4g}%;background:{KIND_COLORS[bar.kind]}"
    look += f";opacity:{max(0.06, bar.share):.3g}" if bar.share < 1 else ""
    thin = " class=thin" * (bar.kind in TRANSFERS)
    title = fragments.safe(f"{bar.label}, from {bar.start:,.3f} to {bar.end:,.3f} min")
    return f'<i{thin} style="{look}" title="{title}"></i>'


def _marks(across: ChartScale, zoom: int) -> str:
    """Minutes below the rows, at round places."""
    marks = across.marks(MARKS * zoom)
    places = across.places(marks).tolist()
    texts = [
        f'<span style="left:{100 * place:.5g}%">{mark:,.5g}</span>'
        for mark, place in zip(marks, places, strict=True)
    ]
    return f'<div class="marks z{zoom}">{"".join(texts)}</div>'


def bars(values: Mapping[str, float], unit: str, around: Mapping[str, float] | None = None) -> str:
    """A bar for each row with its value as a number. `around`: of each row the half width of its interval,
    which is drawn as a line; then each row has its own colour."""
    halves = around or {}
    whole = 1.35 * max((value + halves.get(row, 0.0) for row, value in values.items()), default=0) or 1.0
    drawn = "".join(
        f"<b>{fragments.safe(row)}</b><div>{_amount(value, halves.get(row), color, whole)}</div>"
        for (row, value), color in zip(values.items(), cycle(COLORS if around else COLORS[:1]))
    )
    return f'<div class="spent amounts">{drawn}</div><p class="quiet">{fragments.safe(unit)}</p>'


def _amount(value: float, half: float | None, color: str, whole: float) -> str:
    low, high = (max(0.0, 100 * (value + sign * (half or 0.0)) / whole) for sign in (-1, 1))
    interval = (
        "" if half is None else f'<i class="interval" style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
    )
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    bar = f'<i style="width:{100 * value / whole:.2f}%;background:{color}"></i>'
    return f'{bar}{interval}<span style="left:{high:.2f}%">{number}</span>'


SHADES = (1.0, 0.55, 0.8, 0.35)
SHARE_MIN = 0.005
"""A smaller share has no words."""


def time_bars(roles: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], unit: str = " s") -> str:
    """`roles`: of each the time of each cause, in `unit`; empty: in shares. A cause without a colour is
    waiting. Causes of one colour have different shades in a bar."""
    each = "".join(_bar(role, times, colors, unit) for role, times in roles.items())
    return f'<div class="spent">{each}</div>'


def _bar(role: str, times: Mapping[str, float], colors: Mapping[str, str], unit: str) -> str:
    total = sum(times.values()) or 1.0
    parts, words, used = [], [], dict[str, int]()
    for cause, spent in times.items():
        color = colors.get(cause, WAITING)
        shade = SHADES[used.get(color, 0) % len(SHADES)]
        used[color] = used.get(color, 0) + 1
        share = spent / total
        look = f"background:{escape(color)};opacity:{shade}"
        name = fragments.safe(f"{cause}: {share:.1%}" + (f", {spent:,.1f}{unit}" if unit else ""))
        parts.append(f'<i style="width:{100 * share:.2f}%;{look}" title="{name}"></i>')
        if share >= SHARE_MIN:
            words.append(f'<span><i style="{look}"></i> {fragments.safe(f"{cause} {share:.0%}")}</span>')
    legend = f'<p class="quiet">{" ".join(words)}</p>'
    return f"<b>{fragments.safe(role)}</b><div>{''.join(parts)}</div>{legend}"
