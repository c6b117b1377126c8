"""Evaluate: which versions, in which order, for which share of the time, and which version is best? Pure.

An evaluator pulls one version, and serves it until every completion is generated. Newer versions come while
it is busy. Of each evaluation only the newest version that is due waits. An older one is skipped, with a
reason. If no relay has the version that waits any more, the nearest newer one is evaluated in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

SUPERSEDED = "the evaluator was busy until version {version} was due"
GONE = "its weights were gone before the evaluator had them: version {version} is evaluated in its place"
RESUMED = "its weights were gone when the run was resumed: a newer version is evaluated in its place"

Series = Sequence[tuple[int, float | None]]
"""(version, figure) of one evaluation, in the order of the versions. None: it could not be measured."""


def due(every: int, first: int, newest: int, *, last: int) -> list[int]:
    """The versions from `first` to `newest` that are evaluated: the multiples of `every`, and `last`, which
    is the run's last version."""
    return [version for version in range(first, newest + 1) if version % every == 0 or version == last]


@dataclass(slots=True)
class DueVersions:
    """Evaluations that are due and have not begun, each with one version."""

    wanted: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, version: int) -> int | None:
        """Returns the version that is skipped for this one; None: none."""
        skipped = self.wanted.get(name)
        self.wanted[name] = version
        return skipped

    def next(self, held: Collection[int], pullable: Collection[int]) -> tuple[str, int] | None:
        """The evaluation with the oldest version that the evaluator's relay has: it leaves the relay first.
        In place of one that is not even `pullable` from other relays, the nearest newer. None: there is
        none."""
        ready = [
            (min(newer), name)
            for name, version in self.wanted.items()
            if (newer := [one for one in held if one >= version])
            and (version in newer or version not in pullable)
        ]
        return min(ready)[::-1] if ready else None


def rest_s(computed_s: float, share: float) -> float:
    """How long an evaluator rests after it has computed, so that it computes for `share` of the time.

    Processes that share its processors have them alone for 1 - share of the time. At worst their work takes
    1 / (1 - share) times as long.
    """
    return computed_s * (1 - share) / share


def best(series: Series) -> int | None:
    """The first version with the highest figure; None: nothing was measured."""
    measured = [(figure, -version) for version, figure in series if figure is not None]
    return -max(measured)[1] if measured else None


def since_best(series: Series) -> int:
    """Evaluations since the best one. An evaluation that could not be measured does not count."""
    top = best(series)
    return sum(top is not None and version > top and figure is not None for version, figure in series)
