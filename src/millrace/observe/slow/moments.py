"""What the trainer did at each moment, and whether completions waited for a reward then."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Period = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A period in which nothing changed. `waits`: the trainer waited for a batch. `scoring`: complete turns
    that waited for a reward or an answer."""

    start_s: float
    end_s: float
    waits: bool
    scoring: int

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


class Moments:
    """The moments of one period, in order and without gaps."""

    def __init__(self, period: Period, waits: Iterable[Period], scoring: Iterable[tuple[float, int]]) -> None:
        """`waits` are the trainer's waits, which do not overlap. `scoring` is each change of the number of
        turns that wait for a reward: when, and by how many."""
        changes = [(at, 0, by) for at, by in scoring]
        changes += [(start, 1, 0) for start, _ in waits] + [(end, -1, 0) for _, end in waits]
        self._moments = list(_between(period, sorted(changes)))
        self._starts = [moment.start_s for moment in self._moments]

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._moments)

    def within(self, period: Period) -> Iterator[tuple[Moment, float]]:
        """Each moment that overlaps `period`, with the seconds of the overlap."""
        start, end = period
        for moment in self._moments[max(0, bisect_right(self._starts, start) - 1) :]:
            if moment.start_s >= end:
                return
            if (both := min(end, moment.end_s) - max(start, moment.start_s)) > 0:
                yield moment, both


def _between(period: Period, changes: Sequence[tuple[float, int, int]]) -> Iterator[Moment]:
    """Moments end where a change makes a difference."""
    start, end = period
    waiting = scoring = 0
    for at, waits, scores in changes:
        if start < at < end and (waits or scores):
            yield Moment(start, at, waiting > 0, max(0, scoring))
            start = at
        waiting, scoring = waiting + waits, scoring + scores
    if end > start:
        yield Moment(start, end, waiting > 0, max(0, scoring))
