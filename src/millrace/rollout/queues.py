"""The waiting and the finished continuations of an engine: the same bookkeeping for every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable

from millrace.core.types import Progress, ReplicaLoad, Work
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake


class Queues(ABC):
    """The side of an `Engine` that takes work and gives tokens back. A subclass keeps the running
    continuations."""

    def __init__(self, intake: Intake) -> None:
        self._intake, self.version = intake, -1
        self._waiting: deque[Continuation] = deque()
        self._finished: dict[int, Continuation] = {}  # by trajectory, not yet reported
        self._generated = self._prefilled = self._steps_since_swap = 0

    @abstractmethod
    def _under_way(self) -> Collection[Continuation]:
        """The running continuations, in their order."""

    @abstractmethod
    def _stop(self, continuation: Continuation) -> Continuation:
        """Take `continuation` out of the running continuations."""

    @property
    def has_work(self) -> bool:
        return self.version >= 0 and bool(self._under_way() or self._waiting)

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def _counted_load(self, capacity: int) -> ReplicaLoad:
        """The load by this engine's own count. `capacity`: of its keys and values, in tokens."""
        running = self._under_way()
        return ReplicaLoad(
            version=self.version,
            running=len(running),
            waiting=len(self._waiting),
            kv_used_tokens=sum(len(continuation.tokens) for continuation in running),
            kv_capacity_tokens=capacity,
            steps_since_swap=self._steps_since_swap,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
        )

    def submit(self, works: Iterable[Work]) -> None:
        for continuation in self._intake.take(works):
            trajectory_id = continuation.work.trajectory_id
            self._remove(trajectory_id)
            if continuation.finish is None:
                self._waiting.append(continuation)
            else:
                self._finished[trajectory_id] = continuation

    def release(self, trajectory_ids: Iterable[int]) -> list[Progress]:
        removed = [self._remove(trajectory_id) for trajectory_id in trajectory_ids]
        return [continuation.sampled() for continuation in removed if continuation is not None]

    def take_progress(self, *, ended: bool = False) -> list[Progress]:
        """Progress of running, then of waiting, then of finished continuations. `ended`: only of these."""
        growing = () if ended else (*self._under_way(), *self._waiting)
        continuations = [*growing, *self._finished.values()]
        self._finished.clear()
        return [progress for continuation in continuations for progress in continuation.unreported()]

    def _remove(self, trajectory_id: int) -> Continuation | None:
        if trajectory_id in self._finished:
            return self._finished.pop(trajectory_id)
        for continuation in self._under_way():
            if continuation.work.trajectory_id == trajectory_id:
                return self._stop(continuation)
        for continuation in self._waiting:
            if continuation.work.trajectory_id == trajectory_id:
                self._waiting.remove(continuation)
                return continuation
        return None
