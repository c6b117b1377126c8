"""The staleness book: which groups must be trained by when, and whether all of them can be.

A group with birth b has the deadline d = b + S: if it is trained later, its staleness exceeds the bound S.
The trainer consumes B groups per version. Counted from the version k of its next batch, it can train B (j - k
+ 1) more groups by version j. The live groups are *feasible* at k when

    for every j:  #{g live : d(g) <= j}  <=  B (j - k + 1)

which is necessary (pigeonhole) and sufficient (earliest deadline first) for training all of them in
time. Admission keeps the groups feasible at k, and `choose` at k + 1. Then no group is ever too old.
With r redundant groups the right side is B (j - k + 1) + r for j >= k: up to r groups may miss their
deadline, and end then. Proof: docs/schedules.md. AReaL's `N_r <= B (i + eta + 1)` (arXiv:2505.24298, eq. 3)
is the special case in which the birth of every live group is the current version i.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from sys import maxsize

from millrace.schedule.view import GroupView, View, births_of

NO_LIMIT = maxsize  # groups
UNBOUNDED_ROUNDS = 2
"""Without a staleness bound, live groups are limited to this many rounds. A round fills the slots of all
replicas, and has at least a batch. One round is being generated, and one waits for the trainer."""


def unbounded_groups_max(slots: int, batch_groups: int, group_size: int) -> int:
    """Live groups at most, if no staleness bound limits them."""
    return UNBOUNDED_ROUNDS * max(batch_groups, -(-slots // group_size))


def remaining_groups_max(view: View, staleness_max: int | None) -> int:
    """Live groups at most: what the remaining steps consume, and a named limit where unbounded."""
    consumed = view.steps_left * view.batch_groups + (view.redundant_groups if view.steps_left > 0 else 0)
    if staleness_max is not None:
        return consumed
    slots = sum(replica.slots for replica in view.replicas)
    return min(consumed, unbounded_groups_max(slots, view.batch_groups, view.group_size))


def startable_groups(view: View, staleness_max: int | None, live_max: int = NO_LIMIT) -> int:
    """New groups that may start on the newest version now: within the bound, within `remaining_groups_max`,
    and so that at most `live_max` are live."""
    startable = max(0, min(live_max, remaining_groups_max(view, staleness_max)) - len(view.groups))
    return min(startable, Deadlines(view, staleness_max, view.births).places_left(view.newest))


class Deadlines:
    """Groups counted by deadline, with the free places for each deadline.

    Each live deadline costs one entry. So the cost of `places_left` and `add` grows with the distinct births,
    which are few, and not with the groups. `staleness_max` None: every group fits. `births`: of the groups
    in the book, as in `View.births`.
    """

    def __init__(self, view: View, staleness_max: int | None, births: Iterable[tuple[int, int]] = ()) -> None:
        self._version, self._batch, self._bound = view.version, view.batch_groups, staleness_max
        self._redundant = view.redundant_groups
        self._deadlines: list[int] = []  # ascending
        self._free: list[int] = []  # per deadline j: B (j - k + 1) + r - #{d <= j}
        if staleness_max is not None:
            due = 0
            for birth, count in births:
                due += count
                self._deadlines.append(birth + staleness_max)
                self._free.append(self._places(birth + staleness_max) - due)

    @property
    def feasible(self) -> bool:
        """Whether every group in the book can be trained by its deadline."""
        return all(free >= 0 for free in self._free)

    def places_left(self, birth: int) -> int:
        """How many more groups of this birth keep the book feasible. Grows with `birth`."""
        if self._bound is None:
            return NO_LIMIT
        return max(0, min(self._free[self._entry(birth + self._bound) :]))

    def add(self, birth: int) -> None:
        """Enter one group."""
        if self._bound is not None:
            for index in range(self._entry(birth + self._bound), len(self._free)):
                self._free[index] -= 1

    def owed(self) -> list[tuple[int, int]]:
        """(deadline j, how many groups due by j this batch must have), for every j where it must have any.

        The other groups must be feasible one version later, when B fewer places remain. So the batch owes
        max(0, #{d <= j} - B (j - k) - r).
        """
        return [
            (deadline, self._batch - free)
            for deadline, free in zip(self._deadlines, self._free, strict=True)
            if free < self._batch
        ]

    def _places(self, deadline: int) -> int:
        versions = deadline - self._version + 1
        return self._batch * versions + self._redundant if versions > 0 else 0

    def _entry(self, deadline: int) -> int:
        """Index of a deadline. A new deadline is entered, without groups."""
        index = bisect_left(self._deadlines, deadline)
        if index == len(self._deadlines) or self._deadlines[index] != deadline:
            due = self._places(self._deadlines[index - 1]) - self._free[index - 1] if index else 0
            self._deadlines.insert(index, deadline)
            self._free.insert(index, self._places(deadline) - due)
        return index


def choose(
    view: View, staleness_max: int | None, live: Sequence[GroupView], ranked: Sequence[GroupView]
) -> list[GroupView] | None:
    """The batch: of all batches that leave the rest of `live` feasible, the first in `ranked` order.

    `ranked` holds those ready groups of `live` that are wanted, in that order. Groups that must be
    trained now are in every such batch, whatever their rank. The batches with this property are the bases of
    a matroid. So one greedy pass through `ranked` gives the lexicographically first batch: a group is taken
    if the rest of the batch still has room for what is owed.

    Returns None where there is no such batch yet: too few groups are ready, or one that is owed is not.
    """
    owed = Deadlines(view, staleness_max, births_of(live)).owed()
    left = view.batch_groups
    if len(ranked) < left:
        return None
    due = [group.birth + (staleness_max or 0) for group in ranked]
    if any(count > sum(d <= deadline for d in due) for deadline, count in owed):
        return None
    batch: list[GroupView] = []
    for group, deadline in zip(ranked, due, strict=True):
        if left and all(count < left for j, count in owed if j < deadline):
            batch.append(group)
            left -= 1
            owed = [(j, count - (deadline <= j)) for j, count in owed]
    return batch if not left else None


def overdue(view: View, staleness_max: int | None) -> list[int]:
    """Ids of groups to end so that the others can be trained in time: as few as possible.

    Ready groups are kept before unready ones, then older before younger. Empty as long as admission and
    `choose` were obeyed and births never decreased. After a resume under a tighter bound it may not be empty.
    """
    if Deadlines(view, staleness_max, view.births).feasible:
        return []
    kept, given_up = Deadlines(view, staleness_max), []
    for group in sorted(view.groups, key=lambda g: (not g.ready, g.group_id)):
        if kept.places_left(group.birth):
            kept.add(group.birth)
        else:
            given_up.append(group.group_id)
    return sorted(given_up)
