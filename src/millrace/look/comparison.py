"""Several runs side by side: curves over one axis, and the figures of two runs in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from millrace.look.drawing import figures, fragments
from millrace.look.drawing.charts import CHARTS, Chart, overlaid
from millrace.look.overview import AXES, Overview
from millrace.look.page import Section
from millrace.look.record.steps import POINTS, Axis, Steps
from millrace.run_directory.resume import diff


def compared(runs: Mapping[str, Steps], by: Axis, points: int = POINTS) -> list[Section]:
    """The charts for which any run has points. `legend` shows the colours of all of them."""
    drawn = [(chart, figures.curves_data(overlaid(chart, runs, by, points))) for chart in CHARTS]
    return [
        (
            c.heading,
            f"{c.explanation}{_first(c, runs)}",
            figures.curves(c.name, data, AXES[by], c.digits, log=c.log, legend=False),
        )
        for c, data in drawn
        if data["xs"]
    ]


def legend(names: Iterable[str]) -> str:
    """The colour of each run."""
    swatches = (fragments.swatch(color, name) for name, color in zip(names, cycle(figures.COLORS)))
    return f'<p class="legend">{"".join(swatches)}</p>'


def _first(chart: Chart, runs: Mapping[str, Steps]) -> str:
    """Names the drawn line if a chart of one run has several."""
    labels = list(chart.lines(next(iter(runs.values()))))
    return f" Drawn: {labels[0]}." if len(labels) > 1 else ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of each run, in the order of the runs."""

    name: str
    values: tuple[Any, ...]


_FIGURES: dict[str, Sequence[str]] = {
    "steps": ("steps",),
    "wall time (s)": ("wall_s",),
    "reward, first tenth of the steps": ("reward_first",),
    "reward, last tenth": ("reward_last",),
    "trained tokens/s": ("trained_tokens_per_s",),
    "generated tokens/s": ("generated_tokens_per_s",),
    "mean staleness": ("staleness", "mean"),
    "largest staleness": ("staleness", "max"),
    "fairness of the last batches": ("fairness",),
    "log-prob gap at staleness 0, mean": ("logprob_gap_staleness0", "mean"),
    "trainer idle": ("trainer_idle_fraction",),
    "replicas idle": ("replica_idle_fraction",),
    "restarts": ("restarts",),
    "trajectories trained": ("accounting", "trained"),
    "trajectories failed": ("accounting", "failed"),
    "trajectories stale": ("accounting", "stale"),
}


def figures_of(runs: Sequence[Overview]) -> list[Figure]:
    """The figures of the summaries. A live run has a summary too."""
    summaries = [run.story.summary() for run in runs]
    figures = [Figure(name, tuple(_at(one, path) for one in summaries)) for name, path in _FIGURES.items()]
    parents = tuple(run.parent and str(run.parent) for run in runs)
    return [Figure("began with", parents), *figures] if any(parents) else figures


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value[key]
    return value


def comparison_record(runs: Sequence[Overview], points: int) -> dict[str, Any]:
    """The output of `millrace compare` as JSON types. Each run is compared with the first."""
    first = runs[0]
    return {
        "runs": [run.name for run in runs],
        "figures": {figure.name: list(figure.values) for figure in figures_of(runs)},
        "reward": {run.name: run.steps.curve("reward/mean", points=points).y for run in runs},
        "differences": {
            run.name: [
                {"key": change.key, "old": change.old, "new": change.new}
                for change in diff(first.config, run.config)
            ]
            for run in runs[1:]
        },
    }
