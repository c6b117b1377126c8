"""From a simulated schedule to its time to reward: how many more steps old and unfair batches take.

Fitted on `benchmarks/learning.py` (reports/experiments.md, "What staleness costs in learning", uneven task,
72 steps, 5 seeds). There the mean reward rises by 0.16 from the first fifth of the steps to the last. So a
mean difference of d is a delay of d / 0.16 of the steps between the two.
"""

from __future__ import annotations

from typing import NamedTuple

RISE, SPAN = 0.16, 0.8
"""The rise of the reward from the first fifth of the steps to the last, over so much of the run."""
LOSS_BY_STALENESS = 0.014 / 4
"""Mean reward, for each version of staleness."""
LOSS_BY_UNFAIRNESS = 0.016 / 4.0
"""Mean reward, for each unit of fairness above 1: first ready against in order."""


class Point(NamedTuple):
    """Of one run: mean staleness in versions, trained tokens a second, fairness, seconds of a step."""

    staleness: float
    tokens_per_s: float
    fairness: float | None
    step_s: float

    def dominates(self, other: Point) -> bool:
        """Faster, fresher and fairer, each by more than chance may make it."""
        mine, theirs = max(self.fairness or 1.0, 1.0), max(other.fairness or 1.0, 1.0)
        return (
            self.tokens_per_s > 1.02 * other.tokens_per_s
            and self.staleness <= other.staleness
            and mine <= theirs
        )


def steps_factor(point: Point) -> float:
    """Steps to a reward, over those of fresh and fair batches."""
    unfair = max((point.fairness or 1.0) - 1.0, 0.0)
    loss = LOSS_BY_STALENESS * point.staleness + LOSS_BY_UNFAIRNESS * min(unfair, 4.0)
    return 1.0 + loss / RISE * SPAN


class Curve:
    """The best throughput at each staleness: straight lines between points, never falling."""

    def __init__(self, points: list[Point]) -> None:
        self._points = sorted(points)

    def at(self, staleness: float) -> float:
        """Tokens a second at this mean staleness or a lower one."""
        best = 0.0
        for left, right in zip(self._points, [*self._points[1:], None], strict=True):
            if left.staleness <= staleness:
                best = max(best, left.tokens_per_s)
                if right is not None and right.staleness > staleness:
                    part = (staleness - left.staleness) / (right.staleness - left.staleness)
                    best = max(best, left.tokens_per_s + part * (right.tokens_per_s - left.tokens_per_s))
        return best or self._points[0].tokens_per_s
