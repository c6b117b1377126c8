"""What a schedule can do to batches though every weight is right: unfair samples, or older than needed.

Both are told from steps alone, and the advice names the key by which the schedule in use runs ahead.
"""

from __future__ import annotations

from math import sqrt
from statistics import fmean

from millrace.core.fairness import BAND, BATCHES, fairness, windows
from millrace.observe.doctor.evidence import BatchTold, Evidence
from millrace.observe.doctor.finding import Finding

ERRORS = 2.0  # standard errors beyond the band
STEPS_MIN = 16  # fewer steps say nothing of waiting
WAITS_MAX = 0.05  # of its time: the trainer is the slower side
READY_MIN = 1.5  # batches that wait at the end of a step; the next one is wanted, more are early
STALE_MIN = 1.0

AHEAD = {
    "llamarl": "schedule.lag",
    "areal": "schedule.eta",
    "rlax": "schedule.acceptance_staleness",
    "millrace": "schedule.ahead",
}
"""The key that says how far generation runs ahead; `schedule.staleness_max` for the others."""


def unfair_batches(evidence: Evidence) -> Finding | None:
    """The mean over windows, so that lengths may drift from one window to the next."""
    lengths = [batch.lengths for batch in _batches(evidence)]
    found = [value for part in windows(lengths) if (value := fairness(part)) is not None]
    if not found:
        return None
    mean, error = fmean(found), sqrt(2 / (BATCHES - 1) / len(found))
    low, high = BAND
    if low - ERRORS * error <= mean <= high + ERRORS * error:
        return None
    batches = BATCHES * len(found)
    told = (
        f"over the last {batches} batches fairness is {mean:.2f}; random batches of the same groups have 1 "
        f"with a standard error of {error:.2f}, and the band is {low} to {high}"
    )
    if mean < low:
        return Finding("unfair-batches", (told,), _TOO_EVEN)
    advice = (_SWINGS, f"lower `{_ahead(evidence)}`: with fewer batches in flight, fewer can be overtaken")
    return Finding("unfair-batches", (told,), advice)


def needless_staleness(evidence: Evidence) -> Finding | None:
    """The trainer is the slower side, and yet whole batches wait for it: they get older for nothing."""
    told = [batch for batch in _batches(evidence) if not batch.replayed]
    late = told[len(told) // 2 :]
    if len(late) < STEPS_MIN:
        return None
    waited_s, stepped_s = sum(b.wait_s for b in late), sum(b.step_s for b in late)
    waits = waited_s / max(waited_s + stepped_s, 1e-9)
    ready = fmean(b.groups_ready / b.lengths.groups for b in late)
    staleness = fmean(b.staleness_mean for b in late)
    if waits > WAITS_MAX or ready < READY_MIN or staleness < STALE_MIN:
        return None
    line = (
        f"in the last {len(late)} steps the trainer waited {waits:.0%} of the time, {ready:.1f} batches were "
        f"ready at the end of a step, and the mean staleness is {staleness:.2f}"
    )
    advice = (
        f"lower `{_ahead(evidence)}` by one: generation is ahead, so the trainer loses nothing",
        "or give the trainer what replicas do not need: devices, or cores",
    )
    return Finding("needless-staleness", (line,), advice)


def _batches(evidence: Evidence) -> list[BatchTold]:
    return [step.batch for step in evidence.steps if step.batch is not None]


def _ahead(evidence: Evidence) -> str:
    return AHEAD.get(evidence.schedule, "schedule.staleness_max")


_SWINGS = (
    "short completions are trained together and long ones together: rewards of successive steps swing with "
    "the lengths, and easy batches have little signal"
)
_TOO_EVEN = (
    "batches are more alike than random ones: rows come in an order that goes through the lengths again and "
    "again, or a schedule of your own chooses groups by length",
)
