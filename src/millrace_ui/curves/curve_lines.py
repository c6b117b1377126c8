"""The lines of a chart, of each run or group of runs: smoothed, cut to a range of versions, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace_ui.curves.choices import Band, CurveChoices, column, measured
from millrace_ui.record.steps import Array, Steps

LARGEST = 1e300
"""A larger value is drawn as little as one that is not finite."""
PLACES_MAX = 2_000
"""The mean of a group is of at most so many places of its axis."""


@dataclass(frozen=True, slots=True)
class Line:
    """`y` is smoothed if that was chosen, and `rough` is not. Of a group `y` is the mean of the runs that
    have a value there, `num` how many these are, `low` and `high` are the band. `dots`: its points are
    marked. Not `joined`: nothing is drawn between them."""

    label: str
    x: Array
    y: Array
    rough: Array | None = None
    low: Array | None = None
    high: Array | None = None
    num: Array | None = None
    dots: bool = False
    joined: bool = True


def run_line(label: str, steps: Steps, name: str, choices: CurveChoices) -> Line:
    """The average is over the whole run, so a range of versions changes no value."""
    x, y = (np.asarray(values, float) for values in (steps.axis(choices.by), column(steps, name)))
    x = np.fmax.accumulate(x)  # a host's clock may be behind that of the host before
    known = np.isfinite(x) & (np.abs(y) < LARGEST)
    inside = known & chosen(steps, choices)
    if not choices.smooth:
        return Line(label, x[inside], y[inside])
    even = np.full(len(y), np.nan)
    even[known] = smoothed(y[known].tolist(), choices.smooth)
    return Line(label, x[inside], even[inside], rough=y[inside])


def chosen(steps: Steps, choices: CurveChoices) -> npt.NDArray[np.bool_]:
    """Which steps are in the range of versions."""
    versions = np.asarray(steps.versions)
    first = versions[:1] if choices.first is None else choices.first
    last = versions[-1:] if choices.last is None else choices.last
    return (versions >= first) & (versions <= last)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average without the bias of its start.

    m_t = weight m_(t-1) + (1 - weight) x_t,  y_t = m_t / (1 - weight^t)
    """
    even, mean, bias = [], 0.0, 1.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        bias *= weight
        even.append(mean / (1 - bias))
    return even


def group_line(label: str, members: Sequence[Line], band: Band) -> Line:
    """Between two of its points a run has the values of a straight line. Before and after it has none."""
    known = [line for line in members if len(line.x)]
    if not known:
        return Line(label, *np.empty((2, 0)))
    x = np.unique(np.concatenate([line.x for line in known]))
    x = x[np.unique(np.linspace(0, len(x) - 1, PLACES_MAX).astype(int))]
    values = np.stack([np.interp(x, line.x, line.y, left=np.nan, right=np.nan) for line in known])
    num = np.isfinite(values).sum(axis=0)
    mean = np.nansum(values, axis=0) / num
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    if band is Band.DEVIATION:
        deviation = np.sqrt(np.nansum((values - mean) ** 2, axis=0) / np.maximum(1, num - 1))
        low, high = mean - deviation, mean + deviation
    return Line(label, x, mean, low=low, high=high, num=num.astype(float))


def extremes(y: Array, points: int) -> npt.NDArray[np.intp]:
    """Where at most about `points` points are: the least and the largest of each stretch, and the ends."""
    width = -(-len(y) // max(1, points // 2))
    if width <= 2:
        return np.arange(len(y))
    rows = np.pad(y, (0, -len(y) % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(rows)) * width
    places = np.concatenate([starts + rows.argmin(axis=1), starts + rows.argmax(axis=1), [0, len(y) - 1]])
    return np.unique(np.minimum(places, len(y) - 1))


FIRST_MAX, METRICS_MAX = 12, 48
"""Charts of a page that names no metric, and the most charts of a page."""


@dataclass(frozen=True, slots=True)
class CurveSet:
    """`members`: the runs of each line, by its label. `grouped`: a line is the mean of its runs."""

    members: Mapping[str, Sequence[Steps]]
    choices: CurveChoices
    grouped: bool = False

    @property
    def measured(self) -> list[str]:
        return measured(steps for members in self.members.values() for steps in members)

    @property
    def drawn(self) -> list[str]:
        """The chosen metrics that are measured. If none is chosen, the first."""
        every = self.measured
        named = [name for name in every if name in self.choices.metrics]
        return named[:METRICS_MAX] if self.choices.metrics else every[:FIRST_MAX]

    @property
    def left_out(self) -> list[str]:
        """Chosen metrics that no run measured, or for which there is no room."""
        return sorted(set(self.choices.metrics) - set(self.drawn))

    def lines(self, name: str) -> list[Line]:
        if not self.grouped:
            return [run_line(label, runs[0], name, self.choices) for label, runs in self.members.items()]
        return [
            group_line(label, [run_line("", one, name, self.choices) for one in runs], self.choices.band)
            for label, runs in self.members.items()
        ]

    def across(self) -> tuple[float, float] | None:
        """The ends of the axis of all charts. None: there is no step in the range of versions."""
        ends = []
        for steps in (one for runs in self.members.values() for one in runs):
            x = np.asarray(steps.axis(self.choices.by), float)[chosen(steps, self.choices)]
            x = x[np.isfinite(x)]
            ends += [float(x.min()), float(x.max())] if len(x) else []
        return (min(ends), max(ends)) if ends else None
