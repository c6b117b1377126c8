"""Calls a reward, and turns every outcome into a Score."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from millrace.core.errors import OutOfMemory
from millrace.core.types import Failed, Score
from millrace.rewards.reward_process import Arguments, MadeReward, RewardProcess
from millrace.rewards.rewards import Reward
from millrace.rewards.scores import raised, to_score
from millrace.tasks.rows import Row

LONG_S = 0.001
"""After a longer call on the loop, other messages have their turn."""


class Calls:
    """Calls one reward on the loop: async functions, and plain ones that compute for a moment.

    A call that takes longer than `timeout_s` has no score. An async call is cancelled. A call that blocks the
    interpreter is judged when it returns. Before that, only the caller can end it.
    """

    def __init__(self, reward: Reward, timeout_s: float) -> None:
        self.is_async = reward.is_async
        self._reward, self._timeout_s = reward, timeout_s

    async def score(
        self, completion: str, answer: Any, columns: Row, *, ends_s: float | None = None
    ) -> Score:
        """Score a completion. An error of the reward becomes a Failed, except the want of memory.

        `ends_s`: the deadline on the loop's clock; None: `timeout_s` from now.

        Raises: OutOfMemory: memory is used up, by this call or by earlier calls.
        """
        loop, arguments = asyncio.get_running_loop(), (completion, answer, columns)
        began_s = loop.time()
        if ends_s is None:
            ends_s = began_s + self._timeout_s
        late = too_long(self._reward.name, self._timeout_s)
        if self.is_async:
            return await _awaited(self._reward, self._reward(*arguments), ends_s, late)
        score: Score = _called(self._reward, arguments)
        if (ended_s := loop.time()) - began_s > LONG_S:
            await asyncio.sleep(0)
        return Failed(late) if ended_s > ends_s else score


class PlainCalls:
    """Calls one plain function, in the main thread of a process of its own, one call at a time."""

    is_async = False

    def __init__(self, process: RewardProcess, made: MadeReward, timeout_s: float) -> None:
        self._process, self._made, self._timeout_s = process, made, timeout_s

    async def score(
        self, completion: str, answer: Any, columns: Row, *, ends_s: float | None = None
    ) -> Score:
        """As `Calls.score`. Raises: DeadlineExceeded: the function is over its deadline, and its process was
        killed."""
        if ends_s is None:
            ends_s = asyncio.get_running_loop().time() + self._timeout_s
        late = too_long(self._made.name, self._timeout_s)
        return await self._process.score(self._made.number, (completion, answer, columns), ends_s, late)


def score_plainly(
    reward: Reward, arguments: Arguments, left_s: float, loop: asyncio.AbstractEventLoop
) -> Score:
    """The score, in the main thread of a process whose loop does not run. Raises: OutOfMemory.

    A plain function may return a coroutine, for example a lambda around an async function.
    """
    try:
        result = _called(reward, arguments)
        if not inspect.isawaitable(result):
            score: Score = result
            return score
        late = f"{reward.name} took longer than its deadline"
        return loop.run_until_complete(_awaited(reward, result, loop.time() + left_s, late))
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # an alarm that was left on would end the next call


def _called(reward: Reward, arguments: Arguments) -> Any:
    """The score, or what a coroutine function returned."""
    try:
        with _one_process():
            returned = reward(*arguments)
    except MemoryError as error:
        raise _out_of_memory(reward, error) from None
    except BaseException as error:  # not even SystemExit may end the process
        return raised(reward.name, error, reward.file)
    return returned if inspect.isawaitable(returned) else to_score(reward.name, returned)


async def _awaited(reward: Reward, awaitable: Any, ends_s: float, late: str) -> Score:
    limit = asyncio.timeout_at(ends_s)
    try:
        async with limit:
            with _one_process():
                returned = await awaitable
    except TimeoutError as error:
        return Failed(late) if limit.expired() else raised(reward.name, error, reward.file)
    except MemoryError as error:
        raise _out_of_memory(reward, error) from None
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return raised(reward.name, error, reward.file)  # of a task of the reward's own
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return raised(reward.name, error, reward.file)
    return to_score(reward.name, returned)


@contextmanager
def _one_process() -> Iterator[None]:
    """A child that the function forks, and that leaves the function, ends as a program does. It would give
    the answer of its parent again."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            _end_child(sys.exception())


def _end_child(error: BaseException | None) -> NoReturn:
    with suppress(BaseException):
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
    code = getattr(error, "code", 1) if error is not None else 0
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def too_long(name: str, timeout_s: float) -> str:
    return f"{name} took longer than `reward.timeout_s` ({timeout_s:g} s)"


def _out_of_memory(reward: Reward, error: MemoryError) -> OutOfMemory:
    reason = raised(reward.name, error, reward.file).reason
    return OutOfMemory(f"{reason} (its worker's limit is `reward.memory_mb`)")
