"""Continuous batching, computed instead of run: whole stretches of decode steps at a time.

Between two events (a completion, a submission, a swap) the batch is constant, so its progress is a
division. Time is an argument; nothing here waits. `_clock_s` is the engine's own time: the end of the
last step, prefill or swap that has begun. Work begun before `now` may end after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from millrace.core.types import Finish, Progress, ReplicaLoad, Work
from millrace.sim.costs import Costs, Workload

LOGPROB = -1.0
"""Of every simulated token. Token ids are positions."""


@dataclass(slots=True)
class _Span:
    """Tokens [start, end) sampled under one version."""

    version: int
    start: int
    end: int


class _Sequence:
    """One trajectory on this engine."""

    __slots__ = ("end", "finish", "held", "spans", "told", "work")

    def __init__(self, work: Work, end: int, finish: Finish) -> None:
        self.work, self.end, self.finish = work, end, finish
        self.held = self.told = len(work.tokens)
        self.spans: list[_Span] = []

    @property
    def kv_tokens(self) -> int:
        return len(self.work.prompt) + self.held

    @property
    def kv_tokens_max(self) -> int:
        return len(self.work.prompt) + self.work.sampling.max_tokens

    @property
    def finished(self) -> bool:
        return self.held >= self.end

    def extend(self, count: int, version: int) -> None:
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(_Span(version, self.held, self.held))
        self.held += count
        self.spans[-1].end = self.held

    def progress(self, since: int, version: int) -> Iterator[Progress]:
        """Tokens from `since` on, a part per version; at least one part, and the last one ends it."""
        parts = [(span.version, max(since, span.start), span.end) for span in self.spans if span.end > since]
        for index, (under, start, end) in enumerate(parts or [(version, self.held, self.held)]):
            last = index >= len(parts) - 1
            yield Progress(
                trajectory_id=self.work.trajectory_id,
                lease=self.work.lease,
                start=start,
                tokens=list(range(start, end)),
                logprobs=[LOGPROB] * (end - start),
                version=under,
                finish=self.finish if last and self.finished else None,
            )


class Decoder:
    """An engine with `slots` decode slots and room for `kv_capacity_tokens`.

    A sequence enters a slot when its largest possible KV fits. Its prompt is prefilled once for all
    members of its group that run together.
    """

    def __init__(self, *, slots: int, kv_capacity_tokens: int, costs: Costs, workload: Workload) -> None:
        self.version = -1
        self._slots, self._kv_capacity = slots, kv_capacity_tokens
        self._costs, self._workload = costs, workload
        self._leases: dict[int, int] = {}
        self._waiting: dict[int, _Sequence] = {}
        self._running: dict[int, _Sequence] = {}
        self._finished: list[_Sequence] = []
        self._clock_s = 0.0
        self._steps_since_swap = 0
        self._generated = self._prefilled = 0
        self._busy_s = self._idle_s = 0.0

    @property
    def quiet(self) -> bool:
        """Nothing to do and nothing to tell."""
        return not (self._waiting or self._running or self._finished)

    # -------------------------------------------------------- commands

    def submit(self, works: Iterable[Work], now_s: float, slowdown: float) -> None:
        self.advance(now_s, slowdown)
        self._end_step(now_s, slowdown)
        for work in works:
            tid = work.trajectory_id
            if work.lease <= self._leases.get(tid, -1):
                continue
            self._leases[tid] = work.lease
            self._running.pop(tid, None)
            end, finish = self._workload.completion(work.seed, tid, work.sampling.max_tokens)
            self._waiting[tid] = _Sequence(work, end, finish)
        self._refill(slowdown)

    def release(self, trajectory_ids: Iterable[int], now_s: float, slowdown: float) -> list[Progress]:
        self.advance(now_s, slowdown)
        released: list[Progress] = []
        for tid in trajectory_ids:
            sequence = self._running.pop(tid, None) or self._waiting.pop(tid, None)
            if sequence is not None:
                released += sequence.progress(len(sequence.work.tokens), self.version)
        return released

    def swap(self, version: int, now_s: float, slowdown: float) -> float:
        """Serve `version` from the end of this decode step on. Returns when it does."""
        self.advance(now_s, slowdown)
        self._end_step(now_s, slowdown)
        self.version, self._steps_since_swap = version, 0
        done = self._clock_s = max(self._clock_s, now_s) + self._costs.swap_s * slowdown
        running, self._running = self._running, {}
        for tid, sequence in running.items():
            self._prefill(sequence, slowdown)
            self._running[tid] = sequence
        return done

    def collect(self, now_s: float, slowdown: float) -> list[Progress]:
        """What is new since it was last collected."""
        self.advance(now_s, slowdown)
        news: list[Progress] = []
        for sequence in [*self._finished, *self._running.values()]:
            if sequence.held > sequence.told or sequence.finished:
                news += sequence.progress(sequence.told, self.version)
                sequence.told = sequence.held
        self._finished.clear()
        return news

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._slots,
            kv_used_tokens=sum(sequence.kv_tokens for sequence in self._running.values()),
            kv_capacity_tokens=self._kv_capacity,
            steps_since_swap=self._steps_since_swap,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            busy_s=self._busy_s,
            idle_s=self._idle_s,
        )

    # -------------------------------------------------------- time

    def advance(self, now_s: float, slowdown: float) -> None:
        """Make every decode step that ends by `now_s`."""
        while self.version >= 0:
            self._refill(slowdown)
            if not self._running:
                break
            step_s = self._step_s(slowdown)
            ends_first = min(sequence.end - sequence.held for sequence in self._running.values())
            steps = min(ends_first, int((now_s - self._clock_s) / step_s))
            if steps <= 0:
                return
            self._decode(steps, step_s)
        self._idle_s += max(0.0, now_s - self._clock_s)
        self._clock_s = max(self._clock_s, now_s)

    def _end_step(self, now_s: float, slowdown: float) -> None:
        """A step under way at `now_s` is not interrupted."""
        if self._running and self.version >= 0 and self._clock_s < now_s:
            self._decode(1, self._step_s(slowdown))

    def _step_s(self, slowdown: float) -> float:
        costs = self._costs
        return (costs.decode_base_s + costs.decode_per_sequence_s * len(self._running)) * slowdown

    def _decode(self, steps: int, step_s: float) -> None:
        for sequence in self._running.values():
            sequence.extend(steps, self.version)
        self._clock_s += steps * step_s
        self._busy_s += steps * step_s
        self._steps_since_swap += steps
        self._generated += steps * len(self._running)
        self._retire()

    def _retire(self) -> None:
        ended = [tid for tid, sequence in self._running.items() if sequence.finished]
        self._finished += [self._running.pop(tid) for tid in ended]

    def _refill(self, slowdown: float) -> None:
        """Move waiting sequences into free slots, in order, as far as KV has room."""
        if self.version < 0 or not self._waiting or len(self._running) >= self._slots:
            return
        reserved = sum(sequence.kv_tokens_max for sequence in self._running.values())
        while self._waiting and len(self._running) < self._slots:
            tid, sequence = next(iter(self._waiting.items()))
            reserved += sequence.kv_tokens_max
            if reserved > self._kv_capacity and self._running:
                return
            del self._waiting[tid]
            self._prefill(sequence, slowdown)
            self._running[tid] = sequence
        self._retire()

    def _prefill(self, sequence: _Sequence, slowdown: float) -> None:
        group = sequence.work.group_id
        shared = any(other.work.group_id == group for other in self._running.values())
        count = sequence.held if shared else sequence.kv_tokens
        seconds = count * self._costs.prefill_per_token_s * slowdown
        self._clock_s += seconds
        self._busy_s += seconds
        self._prefilled += count
