"""Calls a reward, in a thread or on the loop, and turns every outcome into a Score."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millrace.core.errors import DeadlineExceeded, OutOfMemory
from millrace.core.types import Failed, Score
from millrace.environments.rewards import Reward
from millrace.environments.rows import Row
from millrace.environments.scores import raised, to_score

LONG_S = 0.001
"""After a longer call on the loop, other messages have their turn."""


class Calls:
    """Calls one reward. Plain functions run in one thread, one call at a time. Async functions run on the
    loop, and so do plain functions that need no thread.

    A call that takes longer than `timeout_s` has no score. An async call is cancelled. A plain function in
    the thread cannot be stopped: the call raises, and the caller kills the worker. A call on the loop, or a
    call that blocks the interpreter, is judged when it returns. Before that, only the caller can end it.
    """

    def __init__(self, reward: Reward, timeout_s: float) -> None:
        self.is_async, self.needs_thread = reward.is_async, reward.needs_thread
        self._reward, self._timeout_s = reward, timeout_s
        self._thread = ThreadPoolExecutor(1, "reward")

    async def score(
        self, completion: str, answer: Any, columns: Row, *, ends_s: float | None = None
    ) -> Score:
        """Score a completion. An error of the reward becomes a Failed, except the want of memory.

        `ends_s`: the deadline on the loop's clock; None: `timeout_s` from now.

        Raises:
            OutOfMemory: memory is used up, by this call or by earlier calls.
            DeadlineExceeded: a plain function is over its deadline, and its thread may never end.
        """
        arguments = (completion, answer, columns)
        if ends_s is None:
            ends_s = asyncio.get_running_loop().time() + self._timeout_s
        if self._reward.is_async:
            return await self._awaited(self._reward(*arguments), ends_s)
        if not self._reward.needs_thread:
            return await self._in_place(arguments, ends_s)
        try:
            async with asyncio.timeout_at(ends_s):
                result = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._called, arguments
                )
        except TimeoutError:
            raise DeadlineExceeded(self._too_long) from None
        # A plain function may return a coroutine, for example a lambda around an async function.
        return result if isinstance(result, Score) else await self._awaited(result, ends_s)

    async def _in_place(self, arguments: tuple[str, Any, Row], ends_s: float) -> Score:
        """Call on the loop. After a long call, the loop lets others run."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        score: Score = self._called(arguments)
        if (ended_s := loop.time()) - began_s > LONG_S:
            await asyncio.sleep(0)
        return Failed(self._too_long) if ended_s > ends_s else score

    def _called(self, arguments: tuple[str, Any, Row]) -> Any:
        try:
            returned = self._reward(*arguments)
        except MemoryError as error:
            raise self._out_of_memory(error) from None
        except BaseException as error:  # not even SystemExit may leave the thread
            return raised(self._reward.name, error, self._reward.file)
        return returned if inspect.isawaitable(returned) else to_score(self._reward.name, returned)

    async def _awaited(self, awaitable: Any, ends_s: float) -> Score:
        name = self._reward.name
        limit = asyncio.timeout_at(ends_s)
        try:
            async with limit:
                returned = await awaitable
        except TimeoutError as error:
            if limit.expired():
                return Failed(self._too_long)
            return raised(name, error, self._reward.file)
        except MemoryError as error:
            raise self._out_of_memory(error) from None
        except (Exception, SystemExit) as error:
            return raised(name, error, self._reward.file)
        return to_score(name, returned)

    @property
    def _too_long(self) -> str:
        return f"{self._reward.name} took longer than `reward.timeout_s` ({self._timeout_s:g} s)"

    def _out_of_memory(self, error: MemoryError) -> OutOfMemory:
        reason = raised(self._reward.name, error, self._reward.file).reason
        return OutOfMemory(f"{reason} (its worker's limit is `reward.memory_mb`)")
