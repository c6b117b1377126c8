"""Heddle's placement: in the order of predicted lengths, so that the slowest replica ends as early as it can.

A replica with n trajectories on s slots decodes each token 1 + `INTERFERENCE` n / s times as slowly as with
one. So a replica ends after that factor times its longest prediction. Groups are sorted, longest first, and
each replica takes a run of them. The runs are those with the least time of the slowest replica.

Source: Heddle, arXiv:2603.28101, presorted dynamic programming. The time of a run depends on its longest
group and on its size. So for a given time the longest run that fits is the best, and a bisection over
the time finds the optimum of the dynamic program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from millrace.schedule.view import ReplicaView, View

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
