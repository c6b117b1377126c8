"""One engine for many callers: one thread decodes, and every other thread waits for its completion."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
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
PROBE = Work(
    trajectory_id=0,
    group_id=0,
    lease=0,
    prompt=token_array([0]),
    tokens=token_array(),
    sampling=Sampling(max_tokens=1, temperature=0.0),
    seed=0,
)
"""A sound engine completes this."""


class EngineFull(WorkerError):
    """As many requests wait as may wait. Ask again later."""


class EngineFailed(WorkerError):
    """The engine cannot complete this request, and can complete others."""


class SharedEngine:
    """Decodes the requests of many threads together, by continuous batching.

    A request with which the engine fails gets that error, and the others go on: a step that failed is done
    again, one request at a time.

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
        self._asked: dict[int, _Asked] = {}  # by trajectory, the oldest first

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._asked)

    def submit(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Future[Completion]:
        """The completion of a prompt, in time. Any thread may call this.

        Raises: EngineFull. WorkerError: the engine has ended.
        The future raises: DataError: the request does not fit the engine. DeadlineExceeded. EngineFailed.
        WorkerError: the engine has ended.
        """
        digest = blake2b(msgspec.msgpack.encode((list(prompt), sampling, seed)), digest_size=8).digest()
        trajectory_id = int.from_bytes(digest, "big")
        with self._lock:
            if self._ended:
                raise WorkerError("the server ends")
            if trajectory_id not in self._asked:
                self._ask(trajectory_id, prompt, sampling, seed)
            return self._asked[trajectory_id].future

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
        self._asked[trajectory_id] = _Asked(work, time.monotonic() + self._answer_s)
        self._new.put(work)

    def stop(self) -> None:
        """End `run` after its present step. A signal handler may call this."""
        self._new.put(None)

    def run(self) -> None:
        """Decode until `stop`. Consumes requests, and waits for one where the engine is idle. In the end
        every request that is under way fails.

        Raises: what the engine raises for a prompt of one token: it is broken."""
        try:
            while self._take():
                try:
                    self._step()
                except Exception as error:
                    self._step_apart(error)
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
                if work.trajectory_id in self._asked:  # or given up before this thread saw it
                    self._submit(work)
            return False
        return True

    def _submit(self, work: Work) -> None:
        try:
            self._engine.submit([work])
        except DataError as error:
            self._settle(work.trajectory_id, error)
        except Exception as error:
            self._fail(work.trajectory_id, error)

    def _step(self) -> None:
        self._engine.step()
        for progress in self._engine.take_progress():
            self._note(progress)

    def _note(self, progress: Progress) -> None:
        if (asked := self._asked.get(progress.trajectory_id)) is None:
            return
        asked.tokens[progress.start :] = progress.columns.tokens
        if progress.finish is not None:
            self._settle(progress.trajectory_id, Completion(asked.tokens, progress.finish))

    def _step_apart(self, error: Exception) -> None:
        """After a step that failed: each request alone has the next token, or its error."""
        self._withdraw(list(self._asked))
        self._check_sound(error)
        for trajectory_id, asked in list(self._asked.items()):
            num = len(asked.tokens)
            try:
                self._engine.submit([asked.again(next(self._leases))])
                while trajectory_id in self._asked and len(asked.tokens) == num and self._engine.has_work:
                    self._step()
            except Exception as own:
                self._fail(trajectory_id, own)
                self._check_sound(own)
            else:
                self._withdraw([trajectory_id])
        for asked in list(self._asked.values()):
            self._submit(asked.again(next(self._leases)))

    def _withdraw(self, trajectory_ids: Sequence[int]) -> None:
        """Take requests out of the engine, with all tokens that it has sampled of them."""
        for progress in self._engine.release(trajectory_ids):
            self._note(progress)

    def _fail(self, trajectory_id: int, error: Exception) -> None:
        self._engine.release([trajectory_id])
        failed = EngineFailed(f"the engine cannot complete this request: {type(error).__name__}: {error}")
        failed.__cause__ = error
        self._settle(trajectory_id, failed)

    def _check_sound(self, error: Exception) -> None:
        """Raises: `error`, because the engine cannot even complete the probe."""
        try:
            self._engine.submit([msgspec.structs.replace(PROBE, lease=next(self._leases))])
            while not any(one.trajectory_id == PROBE.trajectory_id for one in self._engine.take_progress()):
                self._engine.step()
        except Exception:
            raise error from None

    def _expire(self) -> None:
        now_s = time.monotonic()
        for trajectory_id, asked in list(self._asked.items()):
            if asked.until_s > now_s:
                break
            self._engine.release([trajectory_id])
            late = f"no completion within {self._answer_s:g} s: ask for fewer tokens"
            self._settle(trajectory_id, DeadlineExceeded(late))

    def _settle(self, trajectory_id: int, outcome: Completion | Exception) -> None:
        with self._lock:
            asked = self._asked.pop(trajectory_id, None)
        if asked is None:
            return
        if isinstance(outcome, Exception):
            asked.future.set_exception(outcome)
        else:
            asked.future.set_result(outcome)


@dataclass(slots=True)
class _Asked:
    """A request that runs or waits: `future` for those who wait for it, until `until_s`."""

    work: Work
    until_s: float
    future: Future[Completion] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)

    def again(self, lease: int) -> Work:
        """The work from its tokens on."""
        return msgspec.structs.replace(self.work, lease=lease, tokens=token_array(self.tokens))
