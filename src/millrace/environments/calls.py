"""Calling a reward, wherever it must run, and turning whatever happens into a Score."""

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
"""A call on the loop that takes longer lets other messages have their turn."""


class Calls:
    """Calls one reward. Plain functions run in one thread, a call at a time; async ones on the loop, as do
    plain ones for which a thread is of no use.

    No call that takes longer than `timeout_s` has a score. An async one is cancelled. A plain function in its
    thread cannot be stopped: that call raises, and whoever asked for it kills the worker. One on the loop, or
    one that holds the interpreter, is judged when it returns; until then only the asker can end it.
    """

    def __init__(self, reward: Reward, timeout_s: float) -> None:
        self.is_async = reward.is_async
        self._reward, self._timeout_s = reward, timeout_s
        self._thread = ThreadPoolExecutor(1, "reward")

    async def score(self, completion: str, answer: Any, columns: Row) -> Score:
        """What the reward does is a Failed, never raised, but for the want of memory.

        Raises:
            OutOfMemory: whatever holds the memory, this call or those before it.
            DeadlineExceeded: a plain function is over its deadline, and its thread may never be free.
        """
        arguments = (completion, answer, columns)
        if self._reward.is_async:
            return await self._awaited(self._reward(*arguments))
        if not self._reward.needs_thread:
            return await self._in_place(arguments)
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._called, arguments
                )
        except TimeoutError:
            raise DeadlineExceeded(self._too_long) from None
        # A plain function may hand back a coroutine, as a lambda around an async function does.
        return result if isinstance(result, Score) else await self._awaited(result)

    async def _in_place(self, arguments: tuple[str, Any, Row]) -> Score:
        """On the loop, which turns after a call that took long."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        score: Score = self._called(arguments)
        if (took_s := loop.time() - began_s) > LONG_S:
            await asyncio.sleep(0)
        return Failed(self._too_long) if took_s > self._timeout_s else score

    def _called(self, arguments: tuple[str, Any, Row]) -> Any:
        try:
            returned = self._reward(*arguments)
        except MemoryError as error:
            raise self._out_of_memory(error) from None
        except BaseException as error:  # in a thread: even SystemExit must not leave it
            return raised(self._reward.name, error, self._reward.file)
        return returned if inspect.isawaitable(returned) else to_score(self._reward.name, returned)

    async def _awaited(self, awaitable: Any) -> Score:
        name = self._reward.name
        limit = asyncio.timeout(self._timeout_s)
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
        told = raised(self._reward.name, error, self._reward.file).reason
        return OutOfMemory(f"{told} (its worker's limit is `reward.memory_mb`)")
