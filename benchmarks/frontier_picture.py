"""The picture of `frontier.py`: throughput over mean staleness, one panel a world."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from learning_model import Point

from millrace_ui.curves.chart import HEIGHT, ROW, WIDTH, chart
from millrace_ui.curves.curve_lines import Line

INK = "svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #d0d7de } }"
COLUMNS = 2


def picture(path: Path, panels: Mapping[str, Mapping[str, list[Point]]], curves: tuple[str, ...]) -> None:
    """An SVG that is legible on a light page and on a dark one. `panels`: points by label, by title. Only the
    points of `curves` are joined."""
    most = max(p.staleness for panel in panels.values() for points in panel.values() for p in points)
    drawn, height = list[str](), 0
    for index, (title, panel) in enumerate(panels.items()):
        lines = [_line(label, sorted(points), label in curves) for label, points in panel.items()]
        svg = chart(
            f"{title}: thousand tokens/s", lines, (0.0, most), x_label="mean staleness, versions", alone=True
        )
        height = HEIGHT + ROW * (1 + len(lines))
        row, column = divmod(index, COLUMNS)
        place = f'<svg x="{column * WIDTH}" y="{row * height}" width="{WIDTH}" height="{height}" '
        drawn.append(svg.replace("<svg ", place, 1))
    view = f"0 0 {COLUMNS * WIDTH} {-(-len(panels) // COLUMNS) * height}"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}"><style>{INK}</style>'
    path.write_text(opening + "".join(drawn) + "</svg>\n")


def _line(label: str, points: list[Point], joined: bool) -> Line:
    x, y = ([point[i] for point in points] for i in (0, 1))
    return Line(label, np.array(x), np.array(y) / 1e3, dots=True, joined=joined)
