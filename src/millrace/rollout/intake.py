"""The intake of an engine: it takes works that fit the engine, each lease once. Its queues have what waits
and what is finished: the same bookkeeping for every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial

from millrace.core.errors import DataError
from millrace.core.types import Progress, ReplicaLoad, Work
from millrace.rollout.continuation import Continuation

# Leases that are remembered to refuse repeats of old commands: far more than can be in flight at once.
_LEASES_REMEMBERED = 10_000


class Intake:
    """Makes works into continuations.

    Args:
        vocab: token ids are below this.
        eos_ids: token ids that end a completion.
        decode: tokens to text, needed for stop strings only.
        engine: the name of the engine in errors.
    """

    def __init__(
        self,
        *,
        vocab: int,
        max_sequence_tokens: int,
        eos_ids: Iterable[int],
        decode: Callable[[list[int]], str] | None,
        engine: str = "the engine",
    ) -> None:
        self._vocab, self._max_sequence_tokens, self._decode = vocab, max_sequence_tokens, decode
        self._continuation = partial(
            Continuation,
            eos_ids=frozenset(eos_ids),
            max_sequence_tokens=max_sequence_tokens,
            decode=decode,
            vocab=vocab,
            engine=engine,
        )
        self._leases: OrderedDict[int, int] = OrderedDict()

    def take(self, works: Iterable[Work]) -> list[Continuation]:
        """Continuations of the works whose lease is new, in order. Raises: DataError, which names the first
        work that does not fit; then no work is taken."""
        works = list(works)
        for work in works:
            self._check(work)
        return [self._continuation(work) for work in works if self._is_new(work)]

    def _is_new(self, work: Work) -> bool:
        if work.lease <= self._leases.get(work.trajectory_id, -1):
            return False
        self._leases[work.trajectory_id] = work.lease
        self._leases.move_to_end(work.trajectory_id)
        while len(self._leases) > _LEASES_REMEMBERED:
            self._leases.popitem(last=False)
        return True

    def _check(self, work: Work) -> None:
        length, vocab = len(work.prompt) + len(work.tokens), self._vocab
        where = f"trajectory {work.trajectory_id} (group {work.group_id})"
        if not work.prompt:
            raise DataError(f"{where} has an empty prompt: there is nothing to continue")
        if length > self._max_sequence_tokens:
            raise DataError(
                f"{where} has {length} tokens, more than `rollout.max_sequence_tokens` "
                f"({self._max_sequence_tokens})"
            )
        if not (min(work.prompt) >= 0 and max(work.prompt) < vocab):
            raise DataError(f"{where} has token ids outside [0, {vocab}): another tokenizer's?")
        sampling = work.sampling
        named = {*sampling.stop_token_ids, *sampling.banned_token_ids, *(sampling.allowed_token_ids or ())}
        if named and not 0 <= min(named) <= max(named) < vocab:
            raise DataError(f"{where}: `sampling` names tokens outside [0, {vocab}): {sorted(named)}")
        if sampling.logprobs > vocab:
            raise DataError(
                f"{where}: `sampling.logprobs` ({sampling.logprobs}) asks for more than {vocab} tokens"
            )
        if sampling.stop and self._decode is None:
            raise DataError(f"{where} has stop strings, but the engine has no tokenizer to find them with")


# ---------------------------------------------------------------- queues


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
