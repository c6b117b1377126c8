"""Systems that Millrace is compared with and does not run: colocated, one-step and stream pipelines.

Generation is the simulated engine of the replicas, training the cost model; what differs between them is who
waits for whom, which is a few lines each. Times are seconds of an optimizer step in steady state.

    colocated   all devices generate the batch, then all devices train on it (verl's hybrid engine)
    one-step    generation of batch k + 1 runs while batch k is trained; then all wait for new weights
    stream      the trainer starts on groups as they finish and the weights change when the batch is trained
    windowed    verl's fully asynchronous pipeline: streams as above, and starts (1 + s) batches a window

Sources: verl (docs, fully asynchronous policy), Laminar (arXiv:2510.12633, section 2), StreamRL
(arXiv:2504.15930).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import pairwise
from statistics import fmean

from common import sized

from millrace.core.types import Sampling, Work
from millrace_sim.costs.cluster import ClusterCosts
from millrace_sim.costs.workload import Workload
from millrace_sim.roles.batching import BatchingEngine

ROUNDING_S = 1e-6
PARTS = 16
"""Of a batch in the stream pipeline."""
SHARES = 4
"""Parts in which verl's asynchronous trainer takes its batch."""
WINDOWS, WARM_UP_WINDOWS = sized((12, 3), (3, 1))
"""Batches that are played of it; steps are measured after the first of them."""
KV_UNLIMITED = 1 << 60
"""The slots limit what runs together: engines with paged KV admit by what is used, not by what may be."""


@dataclass(frozen=True)
class Batch:
    """What one step is trained on: `prompts` groups of `group_size`, at most `max_units` units each."""

    prompts: int
    group_size: int
    max_units: int
    workload: Workload
    seed: int = 0

    def works(self, group_id: int) -> list[Work]:
        prompt = [0] * self.workload.prompt_length(self.seed, group_id)
        first = group_id * self.group_size
        sampling = Sampling(self.max_units)
        return [Work(first + i, group_id, 1, prompt, [], sampling, self.seed) for i in range(self.group_size)]

    def lengths(self, group_id: int) -> list[int]:
        """Prompt and completion of each member."""
        prompt = self.workload.prompt_length(self.seed, group_id)
        first = group_id * self.group_size
        draws = (
            self.workload.completion_length(self.seed, first + i, self.max_units)
            for i in range(self.group_size)
        )
        return [prompt + length for length, _ in draws]


class Rollout:
    """Replicas that take whole groups, least loaded first, and tell when each group is complete."""

    def __init__(self, costs: ClusterCosts, replicas: int, slots: int, batch: Batch) -> None:
        self._batch = batch
        self._engines = [
            BatchingEngine(
                slots=slots,
                kv_capacity_tokens=KV_UNLIMITED,
                keep_kv=False,
                costs=costs,
                workload=batch.workload,
            )
            for _ in range(replicas)
        ]
        for engine in self._engines:
            engine.swap(0, -costs.swap_s, 1.0)
        self._load = [0] * replicas
        self._left: dict[int, int] = {}
        self._complete: deque[tuple[float, int]] = deque()
        self._next: list[tuple[float, int]] = []

    @property
    def active(self) -> int:
        """Groups that are not complete."""
        return len(self._left)

    def start(self, group_ids: Sequence[int], now_s: float) -> None:
        works: dict[int, list[Work]] = {}
        for group_id in group_ids:
            index = min(range(len(self._load)), key=self._load.__getitem__)
            members = self._batch.works(group_id)
            works.setdefault(index, []).extend(members)
            self._load[index] += len(members)
            self._left[group_id] = len(members)
        for index, given in works.items():
            self._engines[index].submit(given, now_s, 1.0)
        self._schedule()

    def swap(self, version: int, now_s: float) -> None:
        """All replicas go to `version` in the middle of what they do."""
        for engine in self._engines:
            engine.swap(version, now_s, 1.0)
        self._schedule()

    def next_group(self) -> tuple[float, int]:
        """When the next group is complete, and which."""
        while not self._complete:
            self._next_completion()
        return self._complete.popleft()

    def complete_by(self, now_s: float) -> int:
        """Groups complete by `now_s` that were not asked for yet; they count as asked for now."""
        while self._next[0][0] <= now_s:
            self._next_completion()
        count = len(self._complete)
        self._complete.clear()
        return count

    def _next_completion(self) -> None:
        time_s, index = self._next[0]
        parts = self._engines[index].collect(time_s, 1.0, unfinished=False)
        heapreplace(self._next, (self._engines[index].completes_s(1.0) + ROUNDING_S, index))
        for part in parts:
            if part.finish is not None:
                self._finished(part.trajectory_id // self._batch.group_size, index, time_s)

    def _finished(self, group_id: int, index: int, time_s: float) -> None:
        self._load[index] -= 1
        self._left[group_id] -= 1
        if not self._left[group_id]:
            del self._left[group_id]
            self._complete.append((time_s, group_id))

    def _schedule(self) -> None:
        self._next = [(engine.completes_s(1.0) + ROUNDING_S, i) for i, engine in enumerate(self._engines)]
        heapify(self._next)


@dataclass(frozen=True)
class Pipelines:
    """One cluster and workload under the pipelines. `costs` are of the layout that each is asked about."""

    costs: ClusterCosts
    replicas: int
    slots: int
    batch: Batch

    @cached_property
    def ready_s(self) -> list[float]:
        """When each group of a batch is complete, ascending, all of it started at once."""
        rollout = Rollout(self.costs, self.replicas, self.slots, self.batch)
        rollout.start(range(self.batch.prompts), 0.0)
        return [rollout.next_group()[0] for _ in range(self.batch.prompts)]

    @property
    def generation_s(self) -> float:
        return self.ready_s[-1]

    @cached_property
    def _lengths(self) -> list[int]:
        return [length for i in range(self.batch.prompts) for length in self.batch.lengths(i)]

    @cached_property
    def train_s(self) -> float:
        return self.costs.train_s(self._lengths)

    @property
    def barrier_s(self) -> float:
        """Everybody waits while a version travels."""
        return max(self.costs.publish_s, self.costs.swap_s)

    @property
    def tokens(self) -> int:
        """Real tokens of a batch, prompts included."""
        return sum(self._lengths) * self.batch.workload.quantum

    def colocated(self) -> float:
        return self.generation_s + self.train_s + self.barrier_s

    def one_step(self) -> float:
        return max(self.generation_s, self.train_s) + self.barrier_s

    def stream(self) -> float:
        """The batch is trained in `PARTS`, each when its groups are complete."""
        return streamed_s(self.ready_s, self.train_s, PARTS) + self.barrier_s

    def windowed(self, staleness: float, update_s: float) -> float:
        """verl's asynchronous mode with partial rollout: at every weight change, groups are started until
        what runs, waits and will be is (1 + staleness) batches; the trainer takes `SHARES` equal shares, each
        `update_s / SHARES` long, then changes the weights of everybody."""
        rollout = Rollout(self.costs, self.replicas, self.slots, self.batch)
        budget, share = int(self.batch.prompts * (1 + staleness)), self.batch.prompts // SHARES
        now_s, next_id, queued, changes = 0.0, 0, 0, [0.0]
        for version in range(1, WINDOWS + 1):
            count = max(0, budget - rollout.active - queued)
            rollout.start(range(next_id, next_id + count), now_s)
            next_id += count
            for _ in range(SHARES):
                while queued < share:
                    now_s = max(now_s, rollout.next_group()[0])
                    queued += 1
                queued -= share
                now_s += update_s / SHARES
                queued += rollout.complete_by(now_s)
            rollout.swap(version, now_s)
            now_s += self.barrier_s
            changes.append(now_s)
        return fmean(after - before for before, after in pairwise(changes[WARM_UP_WINDOWS:]))


def streamed_s(ready_s: Sequence[float], train_s: float, parts: int) -> float:
    """When the last of `parts` equal shares is trained, the trainer taking each as soon as it is complete."""
    done_s = 0.0
    for part in range(1, parts + 1):
        share = ready_s[max(0, part * len(ready_s) // parts - 1)]
        done_s = max(done_s, share) + train_s / parts
    return done_s
