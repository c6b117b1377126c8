"""Prompts and scores outside a run: the real environment worker in a process of its own.

A completion is treated as in training. Tokens are decoded, and the reward runs under its deadline and memory
limit. If a worker hangs or dies, only that completion fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.config.freeze import recorded
from millrace.config.schema import Config
from millrace.core.errors import DataError, OutOfMemory, WorkerDied
from millrace.core.protocols import Handle, Runtime
from millrace.core.types import BadPrompt, Failed, Prompt, Score, ScoreRequest
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.tasks.prepare import prepare_rows
from millrace.tasks.tasks import PROBED_ROWS

TARGET = "millrace.episodes.reward_worker:TaskRewardWorker"
GRACE_S = 2.0  # after the deadline, which the worker keeps unless its reward blocks the interpreter


@dataclass(frozen=True)
class Timed:
    """A score and its duration. The first score of a new worker includes the start of the worker."""

    score: Score
    seconds: float


def prompts(
    config: Config, count: int, leaves_out: Callable[[Prompt], bool] = lambda prompt: False
) -> list[Prompt]:
    """The first `count` usable prompts of the task, each row once, without those that `leaves_out` names;
    fewer if the task has fewer, and none if all are left out.

    Raises: DataError: no prompt can be used, or more than `PROBED_ROWS` cannot for each that can. After the
    deadline of a worker's start it is more than `count`: an environment may refuse each row after long.
    """
    return asyncio.run(_prompts(config, count, leaves_out))


def scores(config: Config, requests: Sequence[ScoreRequest], *, answers: bool = False) -> list[Timed]:
    """One score per request, in their order. With `answers`, a score has the answer of its completion."""
    with Scorer(config, answers=answers) as scorer:
        return scorer.scores(requests)


class Scorer:
    """Scores one batch of completions after another, in a reward worker that stays between batches.

    A context manager. Call from the main thread, with no event loop running.
    """

    def __init__(self, config: Config, *, answers: bool = False) -> None:
        self._config, self._answers = config, answers
        self._runner, self._runtime = asyncio.Runner(), LocalRuntime()
        self._worker: Handle | None = None

    def scores(self, requests: Sequence[ScoreRequest]) -> list[Timed]:
        """One score per request, in their order."""
        return self._runner.run(self._scores(requests))

    async def _scores(self, requests: Sequence[ScoreRequest]) -> list[Timed]:
        results: list[Timed] = []
        while len(results) < len(requests):
            if self._worker is None:
                self._worker = await start_worker(self._runtime, self._config, answers=self._answers)
            if await drain(self._worker, self._config.reward.timeout_s, requests[len(results) :], results):
                self._worker.kill()
                self._worker = None
        return results

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._runtime.close())
        finally:
            self._runner.close()


async def _prompts(config: Config, count: int, leaves_out: Callable[[Prompt], bool]) -> list[Prompt]:
    runtime = LocalRuntime()
    try:
        worker = await start_worker(runtime, config)
        usable: dict[str, Prompt] = {}  # by row; the first repeated row begins the second epoch
        unusable: dict[str, BadPrompt] = {}
        known: dict[str, Prompt] = {}
        start, until_s = 0, time.monotonic() + config.supervision.spawn_timeout_s

        def too_many() -> bool:
            most = PROBED_ROWS * (len(usable) + len(known) + 1)
            return len(unusable) > (most if time.monotonic() < until_s else count)

        while len(usable) < count and not too_many() and start == len(usable) + len(unusable) + len(known):
            ids = list(range(start, start + count - len(usable)))
            for prompt in await worker.call("prompts", ids, timeout_s=config.supervision.spawn_timeout_s):
                if isinstance(prompt, BadPrompt):
                    unusable.setdefault(prompt.row_id, prompt)
                else:
                    (known if leaves_out(prompt) else usable).setdefault(prompt.row_id, prompt)
            start += len(ids)
    finally:
        await runtime.close()
    if not (usable or known) or (len(usable) < count and too_many()):
        last = next(reversed(unusable.values()))
        raise DataError(f"only {len(usable)} of {start} prompts can be used; the last refusal: {last.reason}")
    return list(usable.values())


async def drain(
    worker: Handle, timeout_s: float, requests: Sequence[ScoreRequest], results: list[Timed]
) -> bool:
    """Append scores until all are there, or until a score ends the worker. Returns whether a score did."""
    stream = worker.stream("score", list(requests))
    for _ in requests:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                _, score = await anext(stream)
        except TimeoutError:
            score, lost = Failed(f"the reward did not answer within {timeout_s:g} s"), True
        except WorkerDied as error:
            score, lost = Failed(f"the reward ended its process: {error}"), True
        except OutOfMemory as error:
            score, lost = Failed(str(error)), True
        else:
            lost = False
        results.append(Timed(score, time.perf_counter() - started))
        if lost:
            return True
    await stream.aclose()
    return False


async def start_worker(
    runtime: Runtime, config: Config, target: str = TARGET, *, answers: bool = False
) -> Handle:
    for part in config.by_part.values():
        prepare_rows(part.one_task)  # which the deadline of the worker's start does not allow for
    kwargs = {"config": recorded(config)} | ({"answers": True} if answers else {})
    return await runtime.spawn("reward worker", target, kwargs, timeout_s=config.supervision.spawn_timeout_s)
