"""The lines that a page of curves draws: of each run, or of each group of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace_ui.curves.choices import CurveChoices
from millrace_ui.curves.curve_lines import Line, chosen, group_line, run_line
from millrace_ui.curves.metrics import measured
from millrace_ui.record.steps import Steps

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
