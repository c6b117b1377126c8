"""Batches that a schedule makes unfair, or older than needed, although every weight is right.

Both rules read steps alone. The advice names the key by which the schedule in use runs ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from millrace.core.fairness import BAND, BATCHES, LengthMoments, fairness, next_correlation, windows
from millrace.diagnose.evidence import BatchFigures, Evidence
from millrace.diagnose.finding import Finding, ahead_key

ERRORS = 2.0  # standard errors beyond the band
STEPS_MIN = 16  # with fewer steps the share of waiting is noise
WAITS_MAX = 0.05  # of its time: a trainer that waits less is the slower side
READY_MIN = 1.5  # batches that wait at the end of a step; the next one is needed, more are early
STALE_MIN = 1.0
SPREAD_MIN = 0.2  # of the mean: lengths that differ by less count as equal
DRIFT = 0.5  # correlation of neighbouring batches, 2.8 standard errors above that of random ones


def unfair_batches(evidence: Evidence) -> Finding | None:
    """The mean fairness over windows, so that lengths may drift from one window to the next.

    Windows of nearly equal lengths are left out: a policy that learns fast changes all lengths from step to
    step by more than groups differ, so the choice of groups does not matter. Windows with similar neighbours
    are left out too: there the policy learns another length. A schedule that trains the first ready groups
    makes neighbours differ.
    """
    clear = [
        window
        for window in windows([batch.lengths for batch in _batches(evidence)])
        if _spread(window) >= SPREAD_MIN and not _drifts(window)
    ]
    values = [value for window in clear if (value := fairness(window)) is not None]
    if not values:
        return None
    mean, error = fmean(values), sqrt(2 / (BATCHES - 1) / len(values))
    low, high = BAND
    if low - ERRORS * error <= mean <= high + ERRORS * error:
        return None
    batches = BATCHES * len(values)
    line = (
        f"over the last {batches} batches fairness is {mean:.2f}. Random batches of the same groups have 1, "
        f"with a standard error of {error:.2f}. Values of {low} to {high} are usual"
    )
    if mean < low:
        return Finding("unfair-batches", (line,), _TOO_EVEN)
    key = ahead_key(evidence)
    lower = [f"lower `{key}`: then fewer batches are in flight, and fewer are overtaken"] if key else []
    return Finding("unfair-batches", (line,), (_SWINGS, *lower))


def needless_staleness(evidence: Evidence) -> Finding | None:
    """The trainer is the slower side, and complete batches wait for it: they get older for nothing."""
    batches = [batch for batch in _batches(evidence) if not batch.replayed]
    late = batches[len(batches) // 2 :]
    if len(late) < STEPS_MIN:
        return None
    waited_s, stepped_s = sum(b.wait_s for b in late), sum(b.step_s for b in late)
    waits = waited_s / max(waited_s + stepped_s, 1e-9)
    ready = fmean(b.groups_ready / b.lengths.groups for b in late)
    staleness = fmean(b.staleness_mean for b in late)
    if waits > WAITS_MAX or ready < READY_MIN or staleness < STALE_MIN:
        return None
    line = (
        f"in the last {len(late)} steps the trainer waited {waits:.0%} of the time. At the end of a step "
        f"{ready:.1f} batches were ready. The mean staleness is {staleness:.2f}"
    )
    key = ahead_key(evidence)
    lower = [f"lower `{key}` by one: generation is ahead, so the trainer loses nothing"] if key else []
    advice = (
        *lower,
        "or give the trainer devices or cores that the replicas do not need",
    )
    return Finding("needless-staleness", (line,), advice)


def _batches(evidence: Evidence) -> list[BatchFigures]:
    return [step.batch for step in evidence.steps if step.batch is not None]


def _spread(batches: Sequence[LengthMoments]) -> float:
    """The standard deviation of group lengths over their mean."""
    num = sum(batch.groups for batch in batches)
    mean = sum(batch.groups * batch.mean for batch in batches) / num
    squares = sum(batch.groups * (batch.std**2 + (batch.mean - mean) ** 2) for batch in batches)
    return sqrt(squares / num) / mean if mean else 0.0


def _drifts(batches: Sequence[LengthMoments]) -> bool:
    correlation = next_correlation(batches)
    return correlation is not None and correlation > DRIFT


_SWINGS = (
    "short completions are trained together, and long completions together. So rewards rise and fall with "
    "the lengths, and easy batches have little signal"
)
_TOO_EVEN = (
    "batches are more alike than random batches: the order of the rows repeats the same lengths, or your own "
    "schedule chooses groups by length",
)
