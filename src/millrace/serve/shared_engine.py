"""One engine for many callers: one thread decodes, and every other thread waits for its completion."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import blake2b
from queue import Empty, SimpleQueue
from threading import Lock

import msgspec

from millrace.core.completion.columns import token_array
from millrace.core.errors import DataError, DeadlineExceeded, WorkerError
from millrace.core.types import Progress, Sampling, Work
from millrace.evaluation.generate import Completion
from millrace.rollout.protocol import Engine

IDLE_S = 1.0
"""An idle engine looks so often whether it is to stop."""
MARGIN_S = 30.0
"""A caller waits so much longer than the deadline, which a step may pass."""


class EngineFull(WorkerError):
    """As many requests wait as may wait. Ask again later."""


class SharedEngine:
    """Decodes the requests of many threads together, by continuous batching.

    Equal requests at the same time are one trajectory: its number, which its noise depends on, is a digest of
    the request. So equal requests get equal noise, whoever else asks.

    Args:
        requests_max: requests that run or wait.
        answer_s: the deadline of a request.
    """

    def __init__(self, engine: Engine, *, requests_max: int, answer_s: float) -> None:
        self._engine, self._requests_max, self._answer_s = engine, requests_max, answer_s
        self._lock, self._new = Lock(), SimpleQueue[Work | None]()
        self._leases, self._ended = itertools.count(), False
        # By trajectory, oldest first: who waits for it, and until when.
        self._asked: dict[int, tuple[Future[Completion], float]] = {}
        self._tokens: dict[int, list[int]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._asked)

    def complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """The completion of a prompt. Any thread may call this, and waits.

        Raises: EngineFull. DataError: the request does not fit the engine. DeadlineExceeded. WorkerError: the
        engine has ended.
        """
        digest = blake2b(msgspec.msgpack.encode((list(prompt), sampling, seed)), digest_size=8).digest()
        trajectory_id = int.from_bytes(digest, "big")
        with self._lock:
            if self._ended:
                raise WorkerError("the server ends")
            if trajectory_id not in self._asked:
                self._ask(trajectory_id, prompt, sampling, seed)
            future, _ = self._asked[trajectory_id]
        try:
            return future.result(self._answer_s + MARGIN_S)
        except TimeoutError as error:
            raise self._too_late() from error

    def _ask(self, trajectory_id: int, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        if len(self._asked) >= self._requests_max:
            raise EngineFull(f"{len(self._asked)} requests run or wait, and no more may: ask again later")
        work = Work(
            trajectory_id=trajectory_id,
            group_id=0,  # of all: equal prompts are computed once
            lease=next(self._leases),
            prompt=token_array(prompt),
            tokens=token_array(),
            sampling=sampling,
            seed=seed,
        )
        self._asked[trajectory_id] = Future(), time.monotonic() + self._answer_s
        self._new.put(work)

    def stop(self) -> None:
        """End `run` after its present step. A signal handler may call this."""
        self._new.put(None)

    def run(self) -> None:
        """Decode until `stop`. Consumes requests, and waits for one where the engine is idle. In the end
        every request that is under way fails.

        Raises: what the engine raises."""
        try:
            while self._take():
                self._engine.step()
                for progress in self._engine.take_progress():
                    self._note(progress)
                self._expire()
        finally:
            with self._lock:
                self._ended = True
            for trajectory_id in list(self._asked):
                self._settle(trajectory_id, WorkerError("the server ends"))

    def _take(self) -> bool:
        """Submit the new requests. False: `stop` was called."""
        wait = not self._asked
        with suppress(Empty):
            while (work := self._new.get(block=wait, timeout=IDLE_S)) is not None:
                wait = False
                if work.trajectory_id not in self._asked:
                    continue  # given up before this thread saw it
                self._tokens[work.trajectory_id] = []
                try:
                    self._engine.submit([work])
                except DataError as error:
                    self._settle(work.trajectory_id, error)
            return False
        return True

    def _note(self, progress: Progress) -> None:
        tokens = self._tokens[progress.trajectory_id]
        tokens.extend(progress.columns.tokens)
        if progress.finish is not None:
            self._settle(progress.trajectory_id, Completion(tokens, progress.finish))

    def _expire(self) -> None:
        now_s = time.monotonic()
        for trajectory_id, (_, until_s) in list(self._asked.items()):
            if until_s > now_s:
                break
            self._engine.release([trajectory_id])
            self._settle(trajectory_id, self._too_late())

    def _settle(self, trajectory_id: int, outcome: Completion | Exception) -> None:
        with self._lock:
            future, _ = self._asked.pop(trajectory_id)
        self._tokens.pop(trajectory_id, None)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no completion within {self._answer_s:g} s: ask for fewer tokens")
