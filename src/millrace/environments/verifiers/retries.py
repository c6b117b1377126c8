"""Calls a reward again that failed, as often as its configuration says."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from millrace.core.types import Failed, Score, Scored
from millrace.environments.calls import Calls, PlainCalls
from millrace.environments.rows import Row
from millrace.environments.verifiers.pauses import pauses_s


class RetriedCalls:
    """Calls that are repeated while they fail, all attempts within one deadline.

    No attempt begins that would end after the deadline if it took as long as the last. A call over
    the deadline, or without memory, ends as it does without retries. The metric `attempts` is the number of
    calls.
    """

    def __init__(self, calls: Calls | PlainCalls, timeout_s: float, attempts: int, backoff_s: float) -> None:
        self.is_async = calls.is_async
        self._calls, self._timeout_s = calls, timeout_s
        self._attempts, self._backoff_s = attempts, backoff_s

    async def score(
        self, completion: str, answer: Any, columns: Row, *, ends_s: float | None = None
    ) -> Score:
        """As `Calls.score`."""
        loop, attempt = asyncio.get_running_loop(), 1
        if ends_s is None:
            ends_s = loop.time() + self._timeout_s
        pauses = pauses_s(completion, self._attempts, self._backoff_s)
        while True:
            begun_s = loop.time()
            score = await self._calls.score(completion, answer, columns, ends_s=ends_s)
            if isinstance(score, Scored):
                return replace(score, metrics={"attempts": float(attempt), **score.metrics})
            pause_s = next(pauses, None)
            if not isinstance(score, Failed):
                return score
            # A call that the deadline cuts costs a plain function its process, and hides the reason.
            if pause_s is None or 2 * loop.time() - begun_s + pause_s >= ends_s:
                late = "" if pause_s is None else ", and there is no time for the next"
                return Failed(f"{score.reason} (attempt {attempt} of {self._attempts}{late})")
            await asyncio.sleep(pause_s)
            attempt += 1
