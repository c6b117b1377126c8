"""A simulated run as lines of text: the work of the trainer and of each replica over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from millrace_sim.report.measure import ReplicaSample, TimedWork, Timeline

BLOCKS = " ▁▂▃▄▅▆▇█"
REPLICAS_SHOWN = 8
STEP, PUBLISH, WAIT = "█", "p", "·"


def timeline_lines(timeline: Timeline, *, width: int = 72) -> list[tuple[str, str]]:
    """(who, bar) of the trainer, a scale of versions, and up to `REPLICAS_SHOWN` replicas.

    A column is the same interval of time in every bar. The trainer's bar shows its main work; a replica's bar
    shows the fraction of time in which the replica decoded. Empty if nothing happened.
    """
    spans = timeline.trainer
    if not spans:
        return []
    start_s, end_s = spans[0].start_s, spans[-1].end_s
    column_s = (end_s - start_s) / width
    edges = [start_s + i * column_s for i in range(width + 1)]
    lines = [("trainer", _trainer(spans, edges)), ("version", _versions(spans, edges))]
    names = sorted(timeline.samples, key=lambda name: (len(name), name))[:REPLICAS_SHOWN]
    return lines + [(name, _replica(timeline.samples[name], edges)) for name in names]


def _trainer(spans: Sequence[TimedWork], edges: Sequence[float]) -> str:
    bar = ""
    for low, high in pairwise(edges):
        spent = {what: _overlap(spans, what, low, high) for what in ("step", "published")}
        if spent["step"] >= (high - low) / 2:
            bar += STEP
        else:
            bar += PUBLISH if spent["published"] >= (high - low) / 2 else WAIT
    return bar


def _overlap(spans: Sequence[TimedWork], what: str, low: float, high: float) -> float:
    return sum(
        max(0.0, min(span.end_s, high) - max(span.start_s, low)) for span in spans if span.what == what
    )


def _versions(spans: Sequence[TimedWork], edges: Sequence[float]) -> str:
    """The last digit of each version where its step ended."""
    bar = [" "] * (len(edges) - 1)
    for span in spans:
        if span.what == "step":
            index = int((span.end_s - edges[0]) / (edges[1] - edges[0]))
            bar[min(max(index, 0), len(bar) - 1)] = str(span.version % 10)
    return "".join(bar)


def _replica(samples: Sequence[ReplicaSample], edges: Sequence[float]) -> str:
    bar = ""
    for low, high in pairwise(edges):
        inside = [sample.busy for sample in samples if low <= sample.time_s < high]
        busy = sum(inside) / len(inside) if inside else _last(samples, low)
        bar += BLOCKS[round(busy * (len(BLOCKS) - 1))]
    return bar


def _last(samples: Sequence[ReplicaSample], before_s: float) -> float:
    earlier = [sample.busy for sample in samples if sample.time_s < before_s]
    return earlier[-1] if earlier else 0.0
