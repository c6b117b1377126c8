"""The fields of a `step` event: a batch's rewards, its staleness, and how fair a sample it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from statistics import fmean
from typing import Any

from millrace.core.fairness import LengthMoments, Window
from millrace.core.types import Batch, StepResult


class StepFields:
    """Fields of the steps of one process, in order. It has the window of the last batches."""

    def __init__(self) -> None:
        self._window = Window()

    def of(self, batch: Batch, result: StepResult) -> dict[str, Any]:
        histogram = staleness_histogram(batch)
        lengths = group_lengths(batch)
        self._window.add(batch.version + 1, lengths, histogram)
        return {
            "reward_mean": fmean(s.reward for g in batch.groups for s in g.sequences),
            "staleness_mean": mean_staleness(batch),
            "staleness_max": max(histogram, default=0),
            "staleness_histogram": histogram,
            "lengths": asdict(lengths),
            "window": asdict(self._window.figures()),
            "trained_tokens": result.trained_tokens,
            "step_s": result.step_s,
            "logprob_gap": {s: list(gap) for s, gap in result.logprob_gap.items()},
            "metrics": result.metrics,
            **({"reward_metrics": means} if (means := reward_metrics(batch)) else {}),
        }


def reward_metrics(batch: Batch) -> dict[str, float]:
    """The metrics of the reward function: for each name the mean over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for group in batch.groups:
        for sequence in group.sequences:
            for name, value in sequence.metrics.items():
                values.setdefault(name, []).append(value)
    return {name: fmean(each) for name, each in values.items()}


def staleness_histogram(batch: Batch) -> dict[int, int]:
    """Trained tokens by staleness, in versions."""
    counts = Counter[int]()
    for group in batch.groups:
        for sequence in group.sequences:
            for version, num_tokens in sequence.columns.sampled_runs:
                counts[batch.version - version] += num_tokens
    return dict(sorted(counts.items()))


def mean_staleness(batch: Batch) -> float:
    """Over trained tokens, in versions."""
    histogram = staleness_histogram(batch)
    return sum(s * n for s, n in histogram.items()) / max(sum(histogram.values()), 1)


def group_lengths(batch: Batch) -> LengthMoments:
    """Moments of the groups' lengths. A group's length is the mean number of tokens of its completions."""
    return LengthMoments.of([fmean(len(s.columns) for s in group.sequences) for group in batch.groups])
