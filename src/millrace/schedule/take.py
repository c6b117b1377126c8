"""Take: which ready groups make the next batch?

A rule only gives the order in which groups are wanted. `Schedule.take` chooses the first batch in that order
that leaves every other live group trainable in time (`deadlines.choose`). The batch is sorted by group id, so
two schedules that choose the same set train on the identical batch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from millrace.schedule.view import GroupView, View

FULL_TOLERANCE_REPLICAS = 8
"""With so many replicas or more, `InOrder` has its full tolerance. Chosen in the simulator."""


class Take(Protocol):
    """The order in which ready groups are wanted."""

    def ranked(self, view: View, ready: list[GroupView]) -> list[GroupView]:
        """The groups of `ready` that may be trained now, most wanted first."""

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
class InOrder:
    """In the order of the data stream, so that a batch is a sample of the stream and not of its short groups.

    Waiting for every straggler would cost speed. So a batch skips groups that are not ready. A group is
    *skipped* by a batch that has a later group of the stream. It is *caught up* by the batch that trains it
    after it was skipped: its id is at most `View.reached`. A batch is fair if the numbers of groups that it
    skips and that it catches up differ by at most sqrt(B). The mean length of B groups has a standard error
    of sigma / sqrt(B), so the mean shifts by the same small number of standard errors for every B. A batch
    catches up more groups only if nothing else is ready. Redundant groups may be skipped besides.

    With fewer than `FULL_TOLERANCE_REPLICAS` replicas the tolerance is less in proportion, but at least 1. A
    replica starts its share of a batch at once. With fewer and larger shares, more of a batch ends at the
    same time.
    """

    def ranked(self, view: View, ready: list[GroupView]) -> list[GroupView]:
        size = view.batch_groups
        tolerance = max(1, round(size**0.5 * min(1.0, len(view.replicas) / FULL_TOLERANCE_REPLICAS)))
        unready = sorted(g.group_id for g in view.groups if not g.ready and g.group_id > view.reached)
        in_order = sorted(ready, key=lambda group: group.group_id)
        split = bisect_right(in_order, view.reached, key=lambda group: group.group_id)
        skipped, new = in_order[:split], in_order[split:]

        def balanced(num: int) -> bool:
            """Whether a batch may catch up `num` groups. The others are the first new groups."""
            rest = size - num
            skips = bisect_right(unready, new[rest - 1].group_id) if 0 < rest <= len(new) else 0
            return rest >= len(new) or num - skips <= tolerance

        num = next(num for num in range(min(len(skipped), size), -1, -1) if balanced(num))
        skips_max = num + tolerance + view.redundant_groups
        if len(unready) > skips_max:
            new = [group for group in new if group.group_id < unready[skips_max]]
        rest = size - num
        return skipped[:num] + new[:rest] + skipped[num:] + new[rest:]

    def describe(self) -> str:
        return "in the order of the stream; about as many groups are skipped as are caught up"


@dataclass(frozen=True, slots=True)
class OldestFirst:
    """AReaL (arXiv:2505.24298): the oldest birth first, then the lowest group id."""

    def ranked(self, view: View, ready: list[GroupView]) -> list[GroupView]:
        return sorted(ready, key=lambda group: (group.birth, group.group_id))

    def describe(self) -> str:
        return "oldest version first"
