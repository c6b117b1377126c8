"""Calls a reward, or the members of a sum of rewards, and turns every outcome into a Score."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

from millrace.config.tables import task as table
from millrace.core.errors import ConfigError, DeadlineExceeded, OutOfMemory, RewardError, SandboxError
from millrace.core.types import Abstain, Failed, Score, Scored
from millrace.rewards.reward_process import Arguments, MadeReward, RewardProcess
from millrace.rewards.rewards import Reward, make_reward
from millrace.rewards.scores import pauses_s, raised, to_score
from millrace.tasks.rows import Row
from millrace.tasks.tasks import Task

_log = logging.getLogger(__name__)

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
        """As `Calls.score`. Raises: as `scores`."""
        left_s = self._timeout_s if ends_s is None else ends_s - asyncio.get_running_loop().time()
        async with aclosing(self.scores([(completion, answer, columns)], left_s)) as scores:
            return await anext(scores)

    def scores(
        self, calls: Iterable[Arguments], timeout_s: float | None = None
    ) -> AsyncGenerator[Score, None]:
        """The scores of calls, in order: see `RewardProcess.scores`. `timeout_s`: of each call.

        Raises: OutOfMemory; DeadlineExceeded: a call is over its deadline, and its process was killed."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        late = too_long(self._made.name, self._timeout_s)
        return self._process.scores(self._made.number, calls, limit_s, late)


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


# ---------------------------------------------------------------- sums


PLAIN = (
    table.GymRewardSection,
    table.MathRewardSection,
    table.JsonRewardSection,
    table.CodeRewardSection,
    table.FunctionRewardSection,
)
"""Rewards that may wait, or compute long. A plain function of them runs in a process of its own."""


def make_calls(
    config: table.Reward, task: Task, run_dir: Path | None, *, limit_memory: bool = False
) -> Member | SumCalls:
    """What calls the reward of a configuration, or each member of a sum.

    `limit_memory`: bound the memory of the process of plain functions by `reward.memory_mb`.

    Raises: ConfigError, RewardError: a reward does not fit the task; of a sum, the error names the member.
    """
    workers = config.most_workers
    make = partial(make_reward, task=task, run_dir=run_dir, workers=workers)
    process = None
    if any(isinstance(one, PLAIN) for one in table.members_of(config).values()):
        process = RewardProcess(make, score_plainly)
    calls = _calls(config, make, process)
    if process is not None and limit_memory:
        process.limit_memory(config.memory_mb)
    return calls


def _calls(
    config: table.Reward, make: Callable[[table.OneReward], Reward], process: RewardProcess | None
) -> Member | SumCalls:
    if not isinstance(config, table.SumRewardSection):
        return _one_calls(config, make, process)
    members = []
    for member in config.members:
        try:
            limited = member.reward.model_copy(update={"timeout_s": config.timeout_s})
            members.append((member, _one_calls(limited, make, process)))
        except (ConfigError, RewardError, SandboxError) as error:
            raise type(error)(f"`reward.members` ({member.name}): {error}") from error
    return SumCalls(members, config.timeout_s)


def _one_calls(
    config: table.OneReward, make: Callable[[table.OneReward], Reward], process: RewardProcess | None
) -> Member:
    calls: Calls | PlainCalls | None = None
    if process is not None and isinstance(config, PLAIN):
        made = process.make(config)
        calls = None if made.is_async else PlainCalls(process, made, config.timeout_s)
    calls = calls or Calls(make(config), config.timeout_s)
    if isinstance(config, table.FunctionRewardSection) and config.attempts > 1:
        return RetriedCalls(calls, config.timeout_s, config.attempts, config.backoff_s)
    return calls


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


Member = Calls | PlainCalls | RetriedCalls


class SumCalls:
    """The weighted sum of rewards. Each member's value is a metric by its name, and its metrics are
    NAME/METRIC.

    The first member that fails or abstains decides: the rest is not called. A member that may be left out
    adds nothing instead, and NAME/abstained and NAME/failed are its shares. If all are left out, the first
    that failed decides, else the first. Plain members come before async ones, so that the calls of a batch
    take turns in the order of the batch. If a plain member is over the deadline, its process is killed.

    Source: TRL leaves out a function that returns None in the same way, with no other weight for the others.
    """

    def __init__(self, members: Sequence[tuple[table.RewardMember, Member]], timeout_s: float) -> None:
        self._members = sorted(members, key=lambda one: one[1].is_async)
        self._timeout_s, self._logged_members = timeout_s, set[str]()
        self.is_async = any(calls.is_async for _, calls in members)

    async def score(self, completion: str, answer: Any, columns: Row) -> Score:
        """Raises: OutOfMemory, DeadlineExceeded: as `Calls.score`."""
        loop = asyncio.get_running_loop()
        ends_s, total, metrics, without = (
            loop.time() + self._timeout_s,
            0.0,
            dict[str, float](),
            list[Score](),
        )
        for member, calls in self._members:
            name = member.name
            if loop.time() >= ends_s:
                limit = f"`reward.timeout_s` ({self._timeout_s:g} s)"
                return Failed(f"{name}: the members before it took longer than {limit}")
            try:
                score = await calls.score(completion, answer, columns, ends_s=ends_s)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{name}: {error}") from None
            metrics |= _shares(member, score)
            if isinstance(score, Scored):
                total += member.weight * score.value
                metrics |= {f"{name}/{key}": value for key, value in score.metrics.items()}
                metrics[name] = score.value
                continue
            without.append(replace(score, reason=f"{name}: {score.reason}"))
            if not _may_miss(member, score):
                return without[-1]
            self._tell(name, without[-1])
        if len(without) == len(self._members):
            return next((one for one in without if isinstance(one, Failed)), without[0])
        return to_score("the sum of the members", {"reward": total, **metrics})

    def _tell(self, name: str, score: Score) -> None:
        """The first failure of each member that is left out goes to the worker's log."""
        if isinstance(score, Failed) and name not in self._logged_members:
            self._logged_members.add(name)
            _log.warning(
                "a member of the sum is left out where it fails; the first failure: %s", score.reason
            )


def _may_miss(member: table.RewardMember, score: Score) -> bool:
    return member.leave_out == "failed" or (member.leave_out == "abstained" and isinstance(score, Abstain))


def _shares(member: table.RewardMember, score: Score) -> dict[str, float]:
    """Whether the member is left out, for each outcome at which it may be."""
    kinds = {"abstained": Abstain, "failed": Failed}
    outcomes = {"never": (), "abstained": ("abstained",), "failed": ("abstained", "failed")}[member.leave_out]
    return {f"{member.name}/{outcome}": float(isinstance(score, kinds[outcome])) for outcome in outcomes}
