"""Heddle: each trajectory as a whole decides when its turns run, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from statistics import fmean

from msgspec.structs import replace

from millrace.config.tables.schedules import Heddle
from millrace.schedule.admit import WithinBound
from millrace.schedule.place import placements
from millrace.schedule.refresh import WhenEmpty
from millrace.schedule.route import LeastLoaded
from millrace.schedule.schedule import Schedule
from millrace.schedule.take import FirstReady
from millrace.schedule.view import QueuedView, ReplicaView, View

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


INTERFERENCE = 1.0
"""With all slots in use a token takes twice as long as alone. Assumed: the paper measures it."""
BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Presorted:
    """A choice of prompts as `LongestFirst`, with another measure of what is equal. Replicas of one version
    share what was admitted to them; the emptiest gets the longest prompts."""

    def pairs(
        self, view: View, pairs: list[tuple[int, str]], lengths: Sequence[float | None]
    ) -> list[tuple[int, str]]:
        known = [length for length in lengths if length is not None]
        usual = fmean(known) if known else 1.0
        tokens = [max(1.0, usual if length is None else length) for length in lengths]
        replicas = {replica.replica_id: replica for replica in view.replicas}
        arranged: list[tuple[int, str]] = []
        for version in {replicas[name].version: None for _, name in pairs}:
            same = [(index, name) for index, name in pairs if replicas[name].version == version]
            names = sorted(dict.fromkeys(name for _, name in same), key=lambda name: replicas[name].load)
            indices = sorted((index for index, _ in same), key=lambda index: -tokens[index])
            hosts = [replicas[name] for name in names]
            sizes = run_sizes([tokens[index] for index in indices], hosts, view.start_size)
            spread = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
            arranged += zip(indices, spread, strict=True)
        return arranged

    def describe(self) -> str:
        return "sorted by the lengths of earlier completions, so that the slowest replica ends early"


def run_sizes(lengths: Sequence[float], hosts: Sequence[ReplicaView], group_size: int) -> list[int]:
    """Groups for each of `hosts`, of `lengths` in descending order, so that the slowest ends first."""
    if not lengths:
        return [0] * len(hosts)
    most = max(host.load for host in hosts) + group_size * len(lengths)
    low, high = 0.0, lengths[0] * (1 + INTERFERENCE * most / min(host.slots for host in hosts))
    best = _runs_within(high, lengths, hosts, group_size)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        sizes = _runs_within(middle, lengths, hosts, group_size)
        if sum(sizes) == len(lengths):
            high, best = middle, sizes
        else:
            low = middle
    return best


def _runs_within(
    time: float, lengths: Sequence[float], hosts: Sequence[ReplicaView], group_size: int
) -> list[int]:
    """The longest run for each of `hosts`, one after the other, that ends by `time`."""
    sizes, begin = list[int](), 0
    for host in hosts:
        size = 0
        if begin < len(lengths):
            trajectories = (time / lengths[begin] - 1) * host.slots / INTERFERENCE - host.load
            size = max(0, min(len(lengths) - begin, int(trajectories / group_size + 1e-9)))
        sizes.append(size)
        begin += size
    return sizes
