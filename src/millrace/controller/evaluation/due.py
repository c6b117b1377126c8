"""Evaluate: which versions, in which order, how hard, and when is it enough? Pure.

An evaluator pulls one version, and keeps it until all is generated. While it is busy newer versions come: of
each evaluation the newest one that is due waits, and an older one that waited is skipped, and told.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

SUPERSEDED = "the evaluator was busy until version {version} was due"
GONE = "its weights had left the relay before the evaluator was free"
RESUMED = "its weights were gone when the run was resumed"

Series = Sequence[tuple[int, float | None]]
"""(version, figure) of one evaluation, in the order of the versions. None: it could not be measured."""


def due(every: int, first: int, newest: int, *, last: int) -> list[int]:
    """The versions from `first` to `newest` that are evaluated: each `every` steps, from the start model on,
    and `last`, the run's last one."""
    return [version for version in range(first, newest + 1) if version % every == 0 or version == last]


@dataclass(slots=True)
class DueVersions:
    """What is due and not begun: of each evaluation one version."""

    wanted: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, version: int) -> int | None:
        """The version that is skipped for this one; None: none."""
        skipped = self.wanted.get(name)
        self.wanted[name] = version
        return skipped

    def next(self, held: Collection[int]) -> tuple[str, int] | None:
        """Of those whose version can be pulled, the one that leaves the relay first. None: there is none."""
        ready = [(version, name) for name, version in self.wanted.items() if version in held]
        return min(ready)[::-1] if ready else None

    def gone(self, reachable: Collection[int]) -> list[tuple[str, int]]:
        """Those whose version is not `reachable` any more, for a newer one is. They wait no longer."""
        newest = max(reachable, default=-1)
        lost = [(name, v) for name, v in self.wanted.items() if v not in reachable and v < newest]
        for name, _ in lost:
            del self.wanted[name]
        return lost


def rest_s(computed_s: float, share: float) -> float:
    """How long an evaluator rests after it has computed, so that it computes for `share` of the time.

    Whoever shares its processors has them alone for 1 - share of the time, so at worst whatever they do takes
    1 / (1 - share) times as long.
    """
    return computed_s * (1 - share) / share


def best(series: Series) -> int | None:
    """The first version with the highest figure; None: nothing was measured."""
    known = [(figure, -version) for version, figure in series if figure is not None]
    return -max(known)[1] if known else None


def since_best(series: Series) -> int:
    """Evaluations since the best one. One that could not be measured counts as none."""
    top = best(series)
    return sum(top is not None and version > top and figure is not None for version, figure in series)
