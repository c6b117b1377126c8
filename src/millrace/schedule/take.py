"""Take: which ready groups make the next batch?

A rule here only says in which order groups are wanted. `Schedule.take` gives the first batch in that order
that leaves every other live group trainable in time (`deadlines.choose`). The batch is sorted by group id, so
two schedules that choose the same set train on the identical batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.schedule.view import GroupView, View


class Take(Protocol):
    """The order in which ready groups are wanted."""

    def ranked(self, view: View, ready: list[GroupView]) -> list[GroupView]:
        """A permutation of `ready`, most wanted first."""

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class FirstReady:
    """First in, first out: in the order in which groups became ready."""

    def ranked(self, view: View, ready: list[GroupView]) -> list[GroupView]:
        return sorted(ready, key=lambda group: (group.ready_rank or 0, group.group_id))

    def describe(self) -> str:
        return "first ready, first trained; groups at their deadline before all others"


@dataclass(frozen=True, slots=True)
class OldestFirst:
    """AReaL (arXiv:2505.24298): the oldest birth first, then the lowest group id."""

    def ranked(self, view: View, ready: list[GroupView]) -> list[GroupView]:
        return sorted(ready, key=lambda group: (group.birth, group.group_id))

    def describe(self) -> str:
        return "oldest version first"
