"""Heddle: each trajectory as a whole decides when its turns run, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from msgspec.structs import replace

from millrace.config.tables.schedules import Heddle
from millrace.schedule.admit import WithinBound
from millrace.schedule.place import placements
from millrace.schedule.refresh import WhenEmpty
from millrace.schedule.route import LeastLoaded
from millrace.schedule.schedule import Schedule
from millrace.schedule.tail.presorted import Presorted
from millrace.schedule.take import FirstReady
from millrace.schedule.view import QueuedView, View

CROWDED = 2.0
"""A turn leaves a home with more than so many times the trajectories of the emptiest replica. Ours."""


@dataclass(frozen=True, slots=True)
class TrajectoryCentric(Schedule):
    """Turns that come back are placed longest trajectory first, and may leave a crowded home."""

    def place(self, view: View, queued: Sequence[QueuedView]) -> list[str | None]:
        order = sorted(range(len(queued)), key=lambda index: -queued[index].tokens)
        turns = self._from_crowded(view, [queued[index] for index in order])
        placed = placements(view, turns, mixes_versions=self.mixes_versions)
        of_index = dict(zip(order, placed, strict=True))
        return [of_index[index] for index in range(len(queued))]

    def _from_crowded(self, view: View, queued: list[QueuedView]) -> list[QueuedView]:
        """`queued` without the homes that a turn had better leave. The gap between its turns is free, so
        it moves then, and its new replica computes its keys and values again."""
        load = {replica.replica_id: replica.load for replica in view.replicas if replica.serving}
        heap = [(num, place, name) for place, (name, num) in enumerate(load.items())]
        heapify(heap)
        turns = list[QueuedView]()
        for turn in queued:
            while heap and heap[0][0] != load[heap[0][2]]:
                _, place, name = heap[0]
                heapreplace(heap, (load[name], place, name))
            emptiest = heap[0][2] if heap else ""
            if turn.home in load and load[turn.home] > CROWDED * (load[emptiest] + 1):
                turn = replace(turn, home="")
            goes_to = turn.home or emptiest
            if goes_to in load:
                load[goes_to] += 1
            turns.append(turn)
        return turns


def heddle(keys: Heddle) -> Schedule:
    """Heddle (arXiv:2603.28101): rollouts of agents, scheduled by trajectory and not by turn.

    All that the bound allows starts at once, placed by predicted lengths (`Presorted`). Of turns that wait,
    that of the longest trajectory goes first: what is long so far stays longest in a heavy tail. A turn may
    go on at another replica while its environment answers.

    Differs: a fine-tuned 0.6B model predicts lengths in the paper, anew after each turn. Here a row's earlier
    completions and the tokens so far do. There single trajectories are placed, and here groups, which share
    the prefill of a prompt. There a turn in flight may be preempted, and a move carries keys and values. Here
    neither happens. The paper gives long trajectories replicas of more devices, found by simulated
    annealing. Here all replicas have one tensor parallel size. The paper's rollouts are synchronous
    (`staleness_max` = 0, the default).
    """
    return TrajectoryCentric(
        kind="heddle",
        staleness_max=keys.staleness_max,
        admit_rule=WithinBound(),
        route_rule=LeastLoaded(),
        refresh_rule=WhenEmpty(),
        take_rule=FirstReady(),
        pair_rule=Presorted(),
    )
