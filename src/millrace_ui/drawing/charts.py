"""The curves of a run, and what each shows. A chart is data; `curves.chart` draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from millrace_ui.record.steps import GAP, Array, Curve, Steps, added, curve, gap_staleness, over

STALENESS = (
    "How many versions newer the trained weights are than the weights that sampled a token. 0: the newest "
    "weights sampled it. The bound of the schedule is the largest staleness that is trained."
)
FAIRNESS = (
    "Whether the last 32 batches are fair samples of their groups: 1 is fair, and usual are 0.5 to 1.3. "
    "It is the variance between batches of the mean length, over the variance that random batches of the "
    "same groups would have. Above 1 similar lengths are trained together. Below 1 batches are more alike "
    "than random ones."
)
GAP_MEANS = (
    "The absolute difference between the log-probs of engine and trainer, in nats, by staleness. At "
    "staleness 0 both have the same weights: there the gap is rounding, and a jump means a bug. With "
    "staleness it grows, because the weights differ."
)

ASYNCHRONY = {"staleness": STALENESS, "fairness": FAIRNESS, "log-prob gap": GAP_MEANS}
"""What the three measures of asynchrony mean, wherever they are shown."""

Lines = Mapping[str, Sequence[float]]

GAPS_MAX = 6
"""The most curves of log-prob gaps. Curves of the smallest staleness come first."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines` are one or more quantities of each step. A logarithmic chart shows values above 0."""

    name: str
    heading: str
    explanation: str
    lines: Callable[[Steps], Lines]
    log: bool = False

    def curves(self, steps: Steps, x: Array) -> dict[str, Curve]:
        """`x` is the axis of the steps."""
        curves = {label: curve(x, self._drawn(y), None) for label, y in self.lines(steps).items()}
        return {label: line for label, line in curves.items() if line.x}

    def _drawn(self, y: Sequence[float]) -> Sequence[float]:
        return [value if value > 0 else float("nan") for value in y] if self.log else y


def _columns(**names: str) -> Callable[[Steps], Lines]:
    """Columns by their labels in the chart. An underscore in a label is a space."""
    return lambda steps: {label.replace("_", " "): steps.column(name) for label, name in names.items()}


def rates(steps: Steps) -> list[float]:
    """Trained tokens per second of a step."""
    return over(steps.column("tokens/trained"), _step_and_wait(steps))


def waits(steps: Steps) -> list[float]:
    """The share of a step's time in which the trainer waits."""
    return over(steps.column("time/wait_s"), _step_and_wait(steps))


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
        _columns(training="reward/mean"),
    ),
    Chart(
        "staleness",
        "Staleness",
        STALENESS,
        _columns(mean="staleness/mean", largest="staleness/max"),
    ),
    Chart(
        "fairness",
        "Fairness",
        FAIRNESS,
        _columns(fairness="window/fairness"),
    ),
    Chart(
        "rate",
        "Speed",
        "Trained tokens per second of a step and the wait before it.",
        lambda steps: {"trained tokens/s of a step": rates(steps)},
    ),
    Chart(
        "wait",
        "Waiting",
        "Share of its time, from 0 to 1, in which the trainer waits for a batch.",
        lambda steps: {"the trainer waits": waits(steps)},
    ),
    Chart(
        "gap",
        "Log-prob gap",
        GAP_MEANS,
        _gaps,
        log=True,
    ),
    Chart("loss", "Loss", "Of the trainer.", _columns(loss="trainer/loss")),
    Chart(
        "entropy",
        "Entropy",
        "Of the policy, in nats a token.",
        _columns(entropy="trainer/entropy"),
    ),
    Chart(
        "gradient",
        "Gradient norm",
        "Before it is clipped.",
        _columns(gradient_norm="trainer/grad_norm"),
        log=True,
    ),
    Chart(
        "signal",
        "Groups without signal",
        "Shares from 0 to 1: groups whose rewards are all equal, and completions that the budget cut.",
        _columns(without_signal="trainer/groups_without_signal", truncated="trainer/truncated"),
    ),
    Chart("length", "Length", "Tokens of a completion.", _columns(tokens="trainer/completion_tokens")),
)
"""All charts, in the order of the page."""
