"""What staleness costs, from held-out rewards. Pure.

A run is compared with the run of the same seed at staleness 0. `steps_to` is where its reward first reaches a
target: `SHARE` of the way from the start to where the run at staleness 0 ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import study  # noqa: F401  (finds benchmarks/)
from stored_runs import interval

SHARE = 0.8
LAST = 3
"""Evaluations whose mean is the final reward."""


def smoothed(rewards: Sequence[float]) -> list[float]:
    """Each with its two neighbours."""
    windows = (rewards[max(0, i - 1) : i + 2] for i in range(len(rewards)))
    return [sum(window) / len(window) for window in windows]


def final(rewards: Sequence[float]) -> float:
    return sum(rewards[-LAST:]) / len(rewards[-LAST:])


def collapsed(rewards: Sequence[float]) -> bool:
    """The run ends below its start."""
    return final(rewards) < rewards[0]


def target(base: Sequence[float]) -> float:
    """`base`: rewards at staleness 0."""
    return base[0] + SHARE * (final(base) - base[0])


def steps_to(rewards: Sequence[float], reward: float, every: int) -> float | None:
    """Where smoothed rewards first reach `reward`, between evaluations in proportion; None: never."""
    means = smoothed(rewards)
    for i, mean in enumerate(means):
        if mean >= reward:
            below = means[i - 1] if i else mean
            part = (reward - below) / (mean - below) if mean > below else 1.0
            return every * (i - 1 + part) if i else 0.0
    return None


@dataclass(frozen=True)
class Cost:
    """Of one arm, over its seeds: means with half widths of 95 % intervals (None: of one seed).

    extra, percent   steps to the target beyond those at staleness 0, and as a percentage of them. A seed that
                     never reaches the target counts with all steps of its run
    missed           seeds that never reach it. If there are any, `extra` and `percent` are at least so much
    below            final reward at staleness 0, less that of the arm
    greedy_below     the same of greedy accuracy
    collapsed        seeds that end below their start
    """

    seeds: int
    extra: tuple[float, float | None]
    percent: tuple[float, float | None]
    missed: int
    below: tuple[float, float | None]
    greedy_below: tuple[float, float | None]
    collapsed: int


@dataclass(frozen=True)
class Outcome:
    """What is known of a run: held-out rewards, and the greedy accuracy of the final model."""

    rewards: list[float]
    greedy: float


def cost(pairs: Sequence[tuple[Outcome, Outcome]], every: int) -> Cost:
    """`pairs`: a run and that at staleness 0, for each seed. Raises: ValueError: there are none."""
    if not pairs:
        raise ValueError("a cost is of one seed or more")
    extra, percent, missed = [], [], 0
    for run, base in pairs:
        goal = target(base.rewards)
        own, least = (steps_to(one.rewards, goal, every) for one in (run, base))
        missed += own is None
        own, least = (
            max(1.0, every * (len(run.rewards) - 1) if steps is None else steps) for steps in (own, least)
        )
        extra.append(own - least)
        percent.append(100 * (own / least - 1))
    return Cost(
        len(pairs),
        interval(extra),
        interval(percent),
        missed,
        interval([final(base.rewards) - final(run.rewards) for run, base in pairs]),
        interval([base.greedy - run.greedy for run, base in pairs]),
        sum(collapsed(run.rewards) for run, _ in pairs),
    )
