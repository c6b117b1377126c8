"""Continuous batching, computed instead of run: many decode steps at a time.

Between two events (a completion, a submission, a swap) the batch is constant and its KV grows evenly. So n
steps take n t + g n (n - 1) / 2 seconds, and the number of steps after a time is the root of that equation.
Time is an argument; nothing here waits. `_clock_s` is the engine's time: the end of the last step, prefill or
swap that has begun. Work that began before `now` may end after `now`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

from millrace.core.completion.columns import TokenColumns
from millrace.core.turns.gaps import Gaps
from millrace.core.types import Finish, Progress, ReplicaLoad, Work
from millrace_sim.costs.interface import CostModel
from millrace_sim.costs.workload import Workload

LOGPROB = -1.0
"""The log-prob of every simulated token. Token ids are positions."""
_POSITIONS, _LOGPROBS = array("i"), array("f")
HEADROOM = 0.05
"""Fraction of KV memory that a paged engine keeps free, for the growth of running sequences, when another
sequence enters."""


class _Request:
    """One trajectory on this engine. While the trajectory runs, it has `origin` + (steps of the engine)
    tokens."""

    __slots__ = ("end", "finish", "mark", "num_reported", "num_tokens", "origin", "running", "spans", "work")

    def __init__(self, work: Work, end: int, finish: Finish) -> None:
        self.work, self.end, self.finish = work, end, finish
        self.num_tokens = self.num_reported = self.mark = len(work.tokens)
        self.spans: list[tuple[int, int, int]] = []  # (version, start, end) of earlier versions
        self.origin = 0
        self.running = False

    @property
    def kv_tokens_max(self) -> int:
        return len(self.work.prompt) + self.work.sampling.max_tokens

    @property
    def finished(self) -> bool:
        return self.num_tokens >= self.end

    def ends_at(self, step: int) -> bool:
        """Whether the trajectory runs, and the engine's step `step` completes it."""
        return self.running and self.end - self.origin == step

    def close_span(self, version: int) -> None:
        """Later tokens are sampled under another version."""
        if self.num_tokens > self.mark:
            self.spans.append((version, self.mark, self.num_tokens))
            self.mark = self.num_tokens

    def progress(self, since: int, version: int) -> Progress:
        """Tokens from `since` on."""
        columns = TokenColumns()
        columns.runs = [(under, end - max(since, start)) for under, start, end in self.spans if end > since]
        if self.num_tokens > max(self.mark, since):
            columns.runs.append((version, self.num_tokens - max(self.mark, since)))
        if self.num_tokens > since:
            columns.tokens, columns.logprobs = _text(since, self.num_tokens)
        finish = self.finish if self.finished else None
        return Progress(self.work.trajectory_id, self.work.lease, since, columns, finish)


def _text(start: int, end: int) -> tuple[array[int], array[float]]:
    """Tokens and log-probs of these positions."""
    if end > len(_POSITIONS):
        _LOGPROBS.extend([LOGPROB] * (2 * end - len(_POSITIONS)))
        _POSITIONS.extend(range(len(_POSITIONS), 2 * end))
    return _POSITIONS[start:end], _LOGPROBS[start:end]


class BatchingEngine:
    """An engine with `slots` decode slots and room for `kv_capacity_tokens`.

    A sequence enters a slot when its largest possible KV fits. Its prompt is prefilled once for all
    members of its group that run together. `paged`: a sequence enters when its present KV fits. When
    memory runs out, the sequence that entered last waits again, and its KV is computed again (vLLM,
    arXiv:2309.06180). `keep_kv`: the KV of a turn that has ended stays while there is room, and its next turn
    computes the rest.
    """

    def __init__(
        self,
        *,
        slots: int,
        kv_capacity_tokens: int,
        keep_kv: bool,
        costs: CostModel,
        workload: Workload,
        paged: bool = False,
    ) -> None:
        self.version = -1
        self._slots, self._kv_capacity, self._paged = slots, kv_capacity_tokens, paged
        self._costs, self._workload = costs, workload
        self._leases: dict[int, int] = {}
        self._waiting: dict[int, _Request] = {}
        self._running: dict[int, _Request] = {}
        self._finished: list[_Request] = []
        self._ends: list[tuple[int, int, _Request]] = []  # (step that ends it, order, sequence), a heap
        self._entered = 0
        self._groups: Counter[int] = Counter()  # running members
        self._kv_tokens = self._kv_reserved = 0
        self._step_s: dict[int, float] = {}  # by batch, without KV
        self._clock_s = 0.0
        self._steps = self._steps_at_swap = 0
        self._generated = self._prefilled = 0
        self._keep_kv, self._gaps = keep_kv, Gaps()
        self._kept: dict[int, int] = {}  # by trajectory, tokens between two turns
        self._kept_tokens = self._reused = self._evicted = 0
        self._busy_s = self._idle_s = 0.0

    @property
    def quiet(self) -> bool:
        """Nothing to do and nothing to report."""
        return not (self._waiting or self._running or self._finished)

    @property
    def decoding(self) -> bool:
        return bool(self._running) and self.version >= 0

    @property
    def has_finished(self) -> bool:
        """A completed sequence was not collected yet."""
        return bool(self._finished)

    # -------------------------------------------------------- commands

    def submit(self, works: Iterable[Work], now_s: float, slowdown: float) -> None:
        self.advance(now_s, slowdown)
        self._end_step(now_s, slowdown)
        for work in works:
            tid = work.trajectory_id
            if work.lease <= self._leases.get(tid, -1):
                continue
            self._leases[tid] = work.lease
            self._take_out(tid)
            end, finish = self._workload.completion_length(
                work.seed, tid, work.sampling.max_tokens, work.turn_start
            )
            self._waiting[tid] = _Request(work, end, finish)
        self._refill(slowdown)

    def release(self, trajectory_ids: Iterable[int], now_s: float, slowdown: float) -> list[Progress]:
        self.advance(now_s, slowdown)
        released: list[Progress] = []
        for tid in trajectory_ids:
            sequence = self._take_out(tid)
            if sequence is not None:
                released.append(sequence.progress(len(sequence.work.tokens), self.version))
        return released

    def swap(self, version: int, now_s: float, slowdown: float) -> float:
        """Serve `version` from the end of this decode step on. Returns when it does."""
        self.advance(now_s, slowdown)
        self._end_step(now_s, slowdown)
        done = self._clock_s = max(self._clock_s, now_s) + self._costs.swap_s * slowdown
        running = [self._leave(tid) for tid in list(self._running)]
        for sequence in [*running, *self._waiting.values()]:
            sequence.close_span(self.version)
        self.version, self._steps_at_swap = version, self._steps
        self._forget_turns()
        for sequence in running:
            self._enter(sequence, slowdown)
        return done

    def sleep(self, now_s: float, slowdown: float) -> None:
        """Serve nothing from the end of this decode step on. Running sequences wait, and lose their KV."""
        self.advance(now_s, slowdown)
        self._end_step(now_s, slowdown)
        running = [self._leave(tid) for tid in list(self._running)]
        for sequence in running:
            sequence.close_span(self.version)
        self._waiting = {sequence.work.trajectory_id: sequence for sequence in running} | self._waiting
        self.version, self._steps_at_swap = -1, self._steps
        self._forget_turns()

    def collect(self, now_s: float, slowdown: float, *, unfinished: bool = True) -> list[Progress]:
        """Progress since the last collection, of completed sequences only unless `unfinished`."""
        self.advance(now_s, slowdown)
        news = [sequence.progress(sequence.num_reported, self.version) for sequence in self._finished]
        self._finished.clear()
        for sequence in self._running.values() if unfinished else ():
            sequence.num_tokens = sequence.origin + self._steps
            if sequence.num_tokens > sequence.num_reported:
                news.append(sequence.progress(sequence.num_reported, self.version))
                sequence.num_reported = sequence.num_tokens
        return news

    def completes_s(self, slowdown: float) -> float:
        """When the next sequence completes if nothing changes until then; infinity if no sequence runs."""
        if not self.decoding:
            return math.inf
        return self._clock_s + _steps_s(self._ends_first(), *self._pace(slowdown))

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_tokens=self._kv_tokens,
            kv_capacity_tokens=self._kv_capacity,
            steps_since_swap=self._steps - self._steps_at_swap,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            reused_tokens=self._reused,
            evicted_tokens=self._evicted,
            busy_s=self._busy_s,
            idle_s=self._idle_s,
        )

    # -------------------------------------------------------- time

    def stall(self, seconds: float) -> None:
        """Running sequences wait for `seconds`."""
        if self.decoding:
            self._clock_s += seconds
            self._idle_s += seconds

    def advance(self, now_s: float, slowdown: float) -> None:
        """Make every decode step that ends by `now_s`."""
        while self.version >= 0:
            self._refill(slowdown)
            if not self._running:
                break
            if self._paged and self._kv_steps() < 1 and len(self._running) > 1:
                self._preempt()
                continue
            step_s, growth_s = self._pace(slowdown)
            steps = min(self._ends_first(), _steps_within(now_s - self._clock_s, step_s, growth_s))
            if self._paged:
                steps = min(steps, max(1, self._kv_steps()) if steps else 0)
            if steps <= 0:
                return
            self._decode(steps, step_s, growth_s)
        self._idle_s += max(0.0, now_s - self._clock_s)
        self._clock_s = max(self._clock_s, now_s)

    def _end_step(self, now_s: float, slowdown: float) -> None:
        """A step under way at `now_s` is not interrupted."""
        if self._running and self.version >= 0 and self._clock_s < now_s:
            self._decode(1, *self._pace(slowdown))

    def _pace(self, slowdown: float) -> tuple[float, float]:
        """Seconds of the next step, and by how much each later one is longer."""
        batch = len(self._running)
        if batch not in self._step_s:
            self._step_s[batch] = self._costs.decode_step_s(batch)
        kv_token_s = self._costs.kv_token_s * slowdown
        return self._step_s[batch] * slowdown + self._kv_tokens * kv_token_s, batch * kv_token_s

    def _decode(self, steps: int, step_s: float, growth_s: float) -> None:
        seconds = _steps_s(steps, step_s, growth_s)
        self._clock_s += seconds
        self._busy_s += seconds
        self._steps += steps
        self._generated += steps * len(self._running)
        self._kv_tokens += steps * len(self._running)
        self._retire()
        self._make_room()

    def _ends_first(self) -> int:
        """Steps until the next running sequence ends."""
        while not self._ends[0][2].ends_at(self._ends[0][0]):
            heappop(self._ends)
        return self._ends[0][0] - self._steps

    def _retire(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            step, _, sequence = heappop(self._ends)
            if sequence.ends_at(step):
                self._leave(sequence.work.trajectory_id).close_span(self.version)
                self._finished.append(sequence)
                self._keep(sequence)

    # -------------------------------------------------------- slots

    def _refill(self, slowdown: float) -> None:
        """Move waiting sequences into free slots, in order, as far as KV has room."""
        if self.version < 0:
            return
        while self._waiting and len(self._running) < self._slots:
            tid, sequence = next(iter(self._waiting.items()))
            if self._running and not self._has_room(sequence):
                return
            del self._waiting[tid]
            self._enter(sequence, slowdown)
        self._retire()

    def _has_room(self, sequence: _Request) -> bool:
        if not self._paged:
            return self._kv_reserved + sequence.kv_tokens_max <= self._kv_capacity
        num_tokens = len(sequence.work.prompt) + sequence.num_tokens
        return self._kv_tokens + num_tokens <= (1.0 - HEADROOM) * self._kv_capacity

    def _kv_steps(self) -> int:
        """Decode steps until KV memory is full."""
        return (self._kv_capacity - self._kv_tokens) // len(self._running)

    def _preempt(self) -> None:
        trajectory_id = next(reversed(self._running))
        self._waiting = {trajectory_id: self._leave(trajectory_id), **self._waiting}

    def _enter(self, sequence: _Request, slowdown: float) -> None:
        """Put a sequence into a slot and compute its KV, without the prompt if a running member has it."""
        work = sequence.work
        shared = len(work.prompt) if self._groups[work.group_id] else 0
        shared = max(shared, self._come_back(work.trajectory_id))
        count = len(work.prompt) + sequence.num_tokens - shared
        seconds = self._costs.prefill_s(count, shared) * slowdown
        self._clock_s += seconds
        self._busy_s += seconds
        self._prefilled += count
        self._groups[work.group_id] += 1
        self._kv_tokens += len(work.prompt) + sequence.num_tokens
        self._kv_reserved += sequence.kv_tokens_max
        self._running[work.trajectory_id] = sequence
        self._make_room()
        sequence.running, sequence.origin = True, sequence.num_tokens - self._steps
        self._entered += 1
        heappush(self._ends, (sequence.end - sequence.origin, self._entered, sequence))

    def _leave(self, trajectory_id: int) -> _Request:
        """Take a sequence out of its slot. The heap keeps its entry until the entry is the first."""
        sequence = self._running.pop(trajectory_id)
        work = sequence.work
        sequence.num_tokens, sequence.running = sequence.origin + self._steps, False
        self._kv_tokens -= len(work.prompt) + sequence.num_tokens
        self._kv_reserved -= sequence.kv_tokens_max
        self._groups[work.group_id] -= 1
        if not self._groups[work.group_id]:
            del self._groups[work.group_id]
        return sequence

    def _take_out(self, trajectory_id: int) -> _Request | None:
        if trajectory_id in self._running:
            return self._leave(trajectory_id)
        if trajectory_id in self._waiting:
            return self._waiting.pop(trajectory_id)
        for sequence in self._finished:
            if sequence.work.trajectory_id == trajectory_id:
                self._finished.remove(sequence)
                return sequence
        return None

    # -------------------------------------------------------- between turns

    def _keep(self, sequence: _Request) -> None:
        tid = sequence.work.trajectory_id
        if self._keep_kv and sequence.finish is Finish.STOP:
            self._kept[tid] = len(sequence.work.prompt) + sequence.num_tokens
            self._kept_tokens += self._kept[tid]
            self._gaps.leave(tid, self._clock_s)

    def _come_back(self, trajectory_id: int) -> int:
        """How many tokens were kept."""
        self._gaps.come_back(trajectory_id, self._clock_s)
        kept = self._kept.pop(trajectory_id, 0)
        self._kept_tokens, self._reused = self._kept_tokens - kept, self._reused + kept
        return kept

    def _make_room(self) -> None:
        """The sequence that is expected back latest loses its KV, until running sequences have theirs."""
        while self._kept and not self._has_room_for_turns():
            last = max(self._kept, key=lambda tid: self._gaps.left_s(tid, self._clock_s))
            kept = self._kept.pop(last)
            self._kept_tokens, self._evicted = self._kept_tokens - kept, self._evicted + kept

    def _has_room_for_turns(self) -> bool:
        if self._paged:
            return self._kv_tokens + self._kept_tokens <= self._kv_capacity
        fit = self._kv_reserved + self._kept_tokens <= self._kv_capacity
        return fit and len(self._running) + len(self._kept) <= self._slots

    def _forget_turns(self) -> None:
        self._kept.clear()
        self._kept_tokens = 0


def _steps_s(steps: int, step_s: float, growth_s: float) -> float:
    return steps * step_s + growth_s * steps * (steps - 1) / 2


def _steps_within(seconds: float, step_s: float, growth_s: float) -> int:
    """The most steps that end within `seconds`: the root of their summed time."""
    if seconds < step_s or not growth_s:
        return int(seconds / step_s)
    linear = step_s - growth_s / 2
    return int((math.sqrt(linear * linear + 2 * growth_s * seconds) - linear) / growth_s)
