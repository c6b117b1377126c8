"""Several runs side by side: their figures, and the keys that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.run_directory.resume import diff
from millrace_ui.overview import Overview
from millrace_ui.record.evaluation_points import newest_figures


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
    evaluated = [newest_figures(run.run, run.config) for run in runs]
    names = dict.fromkeys(name for one in evaluated for name in one)
    at = list(_FIGURES).index("reward, last tenth") + 1
    figures[at:at] = [Figure(name, tuple(one.get(name) for one in evaluated)) for name in names]
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
