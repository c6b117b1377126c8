"""Plots as inline SVG: no library, readable in any browser. Coordinates are pixels of the drawing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, MARGIN, RIGHT = 940, 150, 30
ROW, TICKS = 26, 8
COLORS = ("#3b6ea5", "#d08a2e", "#4a9a63", "#a94f64", "#7a62a8", "#7c7c7c", "#3a9ca6", "#b5a642")
INK, FAINT, IDLE = "#333", "#ddd", "#efefef"


@dataclass(slots=True)
class Drawing:
    """Marks on a canvas of `WIDTH` by `height`."""

    height: int
    marks: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: str,
        *,
        title: str = "",
        opacity: float = 1.0,
    ) -> None:
        shown = f"<title>{escape(title)}</title>" if title else ""
        self.marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" '
            f'fill="{color}" fill-opacity="{opacity:.2f}">{shown}</rect>'
        )

    def line(self, points: Iterable[tuple[float, float]], color: str, width: float = 1.5) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>')

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", color: str = INK) -> None:
        self.marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
        )

    def __str__(self) -> str:
        body = "".join(self.marks)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}" '
            f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12">{body}</svg>'
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """From `low`..`high` to the plotting area, with round ticks."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        span = max(self.high - self.low, 1e-12)
        return MARGIN + (WIDTH - MARGIN - RIGHT) * (value - self.low) / span

    def ticks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten, at most `TICKS` of them."""
        span = max(self.high - self.low, 1e-12)
        magnitude = 10.0 ** floor(log10(span / TICKS))
        step = next(magnitude * k for k in (1, 2, 5, 10) if span / (magnitude * k) <= TICKS)
        first = ceil(self.low / step)
        return [k * step for k in range(first, floor(self.high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number as people read it."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.3g}"


def bars(rows: Mapping[str, tuple[float, float]], unit: str) -> str:
    """A horizontal bar for each row: (value, half width of its interval, 0 for none)."""
    drawing = Drawing(ROW * len(rows) + 30)
    scale = Scale(0.0, max((v + h for v, h in rows.values()), default=1.0) * 1.15)
    for index, (name, (value, half)) in enumerate(rows.items()):
        y = ROW * index + 5
        drawing.text(MARGIN - 8, y + 13, name, anchor="end")
        drawing.rect(MARGIN, y, scale(value) - MARGIN, 18, color(index))
        label = f"{short(value)} {unit}"
        if half:
            drawing.line([(scale(value - half), y + 9), (scale(value + half), y + 9)], INK)
            label += f" ± {short(half)}"
        drawing.text(scale(value + half) + 6, y + 13, label)
    return str(drawing)


def columns(series: Mapping[str, Mapping[int, float]]) -> str:
    """Histograms over small integers, side by side: fractions of 1."""
    height, base = 180, 140
    drawing = Drawing(height)
    places = sorted({place for row in series.values() for place in row})
    slot = (WIDTH - MARGIN - RIGHT) / max(1, len(places))
    wide = slot * 0.8 / max(1, len(series))
    for tick in (0.0, 0.5, 1.0):
        y = base - 120 * tick
        drawing.line([(MARGIN, y), (WIDTH - RIGHT, y)], FAINT, 1)
        drawing.text(MARGIN - 8, y + 4, f"{tick:.0%}", anchor="end")
    for index, (name, row) in enumerate(series.items()):
        for at, place in enumerate(places):
            share = row.get(place, 0.0)
            x = MARGIN + slot * (at + 0.1) + wide * index
            title = f"{name}: {share:.1%}"
            drawing.rect(x, base - 120 * share, wide, 120 * share, color(index), title=title)
    for at, place in enumerate(places):
        drawing.text(MARGIN + slot * (at + 0.5), base + 16, str(place), anchor="middle")
    _legend(drawing, list(series), height - 8)
    return str(drawing)


def lines(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves over seconds."""
    height, base, top = 220, 170, 10
    drawing = Drawing(height)
    points = [point for row in series.values() for point in row]
    scale = Scale(0.0, max((x for x, _ in points), default=1.0))
    most = max((y for _, y in points), default=1.0) or 1.0
    for share in (0.0, 0.5, 1.0):
        y = base - (base - top) * share
        drawing.line([(MARGIN, y), (WIDTH - RIGHT, y)], FAINT, 1)
        drawing.text(MARGIN - 8, y + 4, short(most * share), anchor="end")
    for index, row in enumerate(series.values()):
        drawing.line(((scale(x), base - (base - top) * y / most) for x, y in row), color(index))
    seconds_axis(drawing, scale, base + 14)
    _legend(drawing, list(series), height - 8)
    return str(drawing)


def seconds_axis(drawing: Drawing, scale: Scale, y: float) -> None:
    for tick in scale.ticks():
        drawing.text(scale(tick), y, f"{tick:g} s", anchor="middle", color="#777")


def color(index: int) -> str:
    """Of row, curve or version number `index`."""
    return COLORS[index % len(COLORS)]


def _legend(drawing: Drawing, names: Sequence[str], y: float) -> None:
    x = float(MARGIN)
    for index, name in enumerate(names):
        drawing.rect(x, y - 9, 10, 10, color(index))
        drawing.text(x + 14, y, name)
        x += 30 + 7.5 * len(name)
