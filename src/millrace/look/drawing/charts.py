"""The curves of a run, and what each shows. A chart is data; `figures` draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from millrace.look.record.steps import GAP, POINTS, Axis, Curve, Steps, added, curve, gap_staleness, over

Lines = Mapping[str, Sequence[float]]

GAPS_MAX = 6
"""The most curves of log-prob gaps. Curves of the smallest staleness come first."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines` are one or more quantities of each step. A logarithmic chart shows values above 0."""

    name: str
    heading: str
    explanation: str
    digits: str
    lines: Callable[[Steps], Lines]
    log: bool = False

    def curves(self, steps: Steps, by: Axis, points: int = POINTS) -> dict[str, Curve]:
        x = steps.axis(by)
        curves = {label: curve(x, self._drawn(y), points) for label, y in self.lines(steps).items()}
        return {label: line for label, line in curves.items() if line.x}

    def _drawn(self, y: Sequence[float]) -> Sequence[float]:
        return [value if value > 0 else float("nan") for value in y] if self.log else y


def _columns(**names: str) -> Callable[[Steps], Lines]:
    """Columns by their labels in the chart. An underscore in a label is a space."""
    return lambda steps: {label.replace("_", " "): steps.column(name) for label, name in names.items()}


def _rates(steps: Steps) -> Lines:
    return {"trained tokens/s of a step": over(steps.column("tokens/trained"), _step_and_wait(steps))}


def _waits(steps: Steps) -> Lines:
    return {"the trainer waits": over(steps.column("time/wait_s"), _step_and_wait(steps))}


def _step_and_wait(steps: Steps) -> list[float]:
    return added(steps.column("time/step_s"), steps.column("time/wait_s"))


def _gaps(steps: Steps) -> Lines:
    names = [name for name in steps.names(GAP) if name.endswith("/mean")]
    chosen = [name for name in sorted(names, key=gap_staleness) if isfinite(gap_staleness(name))][:GAPS_MAX]
    return {f"staleness {gap_staleness(name):.0f}": steps.column(name) for name in chosen}


CHARTS: tuple[Chart, ...] = (
    Chart(
        "reward",
        "Reward",
        "Mean over the trajectories of a step, or over the samples of an evaluation.",
        "0.[000]",
        _columns(training="reward/mean"),
    ),
    Chart(
        "staleness",
        "Staleness",
        "Of the tokens of a step, in versions.",
        "0.[00]",
        _columns(mean="staleness/mean", largest="staleness/max"),
    ),
    Chart(
        "fairness",
        "Fairness",
        "Of the last 32 batches. 1: random choices of groups; usual are 0.5 to 1.3.",
        "0.[00]",
        _columns(fairness="window/fairness"),
    ),
    Chart("rate", "Speed", "Trained tokens per second of a step and the wait before it.", "0,0", _rates),
    Chart("wait", "Waiting", "Share of its time in which the trainer waits for a batch.", "0%", _waits),
    Chart(
        "gap",
        "Log-prob gap",
        "Engine against trainer, in nats, by staleness. At 0 the weights are equal: it is rounding.",
        "0.[0000]",
        _gaps,
        log=True,
    ),
    Chart("loss", "Loss", "Of the trainer.", "0.[0000]", _columns(loss="trainer/loss")),
    Chart(
        "entropy",
        "Entropy",
        "Of the policy, in nats a token.",
        "0.[000]",
        _columns(entropy="trainer/entropy"),
    ),
    Chart(
        "gradient",
        "Gradient norm",
        "Before it is clipped.",
        "0.[000]",
        _columns(gradient_norm="trainer/grad_norm"),
        log=True,
    ),
    Chart(
        "signal",
        "Groups without signal",
        "Share of the groups whose rewards are all equal, and of the completions that the budget cut.",
        "0%",
        _columns(without_signal="trainer/groups_without_signal", truncated="trainer/truncated"),
    ),
    Chart(
        "length", "Length", "Tokens of a completion.", "0,0.[0]", _columns(tokens="trainer/completion_tokens")
    ),
)
"""All charts, in the order of the page."""


def overlaid(chart: Chart, runs: Mapping[str, Steps], by: Axis, points: int = POINTS) -> dict[str, Curve]:
    """All curves of one run, by their labels; of several runs the first curve of each, by the run's name."""
    drawn = {name: chart.curves(steps, by, points) for name, steps in runs.items()}
    if len(drawn) == 1:
        return next(iter(drawn.values()))
    return {name: next(iter(lines.values()), Curve([], [])) for name, lines in drawn.items()}
