"""Calls the members of a sum of rewards, and adds their values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from millrace.config.tables import task as table
from millrace.core.errors import ConfigError, DeadlineExceeded, RewardError, SandboxError
from millrace.core.types import Failed, Score, Scored
from millrace.environments.calls import Calls
from millrace.environments.rewards import make_reward
from millrace.environments.rows import Row
from millrace.environments.scores import to_score
from millrace.environments.tasks import Task


def make_calls(config: table.Reward, task: Task, run_dir: Path | None) -> Calls | SumCalls:
    """What calls the reward of a configuration, or each member of a sum.

    Raises: ConfigError, RewardError: a reward does not fit the task; of a sum, the error names the member.
    """
    workers = config.most_workers
    if not isinstance(config, table.SumRewardSection):
        return Calls(make_reward(config, task, run_dir=run_dir, workers=workers), config.timeout_s)
    members = []
    for member in config.members:
        try:
            limited = member.reward.model_copy(update={"timeout_s": config.timeout_s})
            reward = make_reward(limited, task, run_dir=run_dir, workers=workers)
        except (ConfigError, RewardError, SandboxError) as error:
            raise type(error)(f"`reward.members` ({member.name}): {error}") from error
        members.append((member, Calls(reward, config.timeout_s)))
    return SumCalls(members, config.timeout_s)


class SumCalls:
    """The weighted sum of rewards. Each member's value is a metric by its name, and its metrics are
    NAME/METRIC.

    The first member that fails or abstains decides: the rest is not called. Plain members come before async
    ones, so that the calls of a batch take turns in the order of the batch. If a plain member is over the
    deadline, its thread may never end.
    """

    def __init__(self, members: Sequence[tuple[table.RewardMember, Calls]], timeout_s: float) -> None:
        self._members = sorted(members, key=lambda one: one[1].is_async)
        self._timeout_s = timeout_s
        self.is_async = any(calls.is_async for _, calls in members)

    async def score(self, completion: str, answer: Any, columns: Row) -> Score:
        """Raises: OutOfMemory, DeadlineExceeded: as `Calls.score`."""
        name, in_thread, total, metrics = "", False, 0.0, dict[str, float]()
        try:
            async with asyncio.timeout(self._timeout_s):
                for member, calls in self._members:
                    name, in_thread = member.name, calls.needs_thread and not calls.is_async
                    score = await calls.score(completion, answer, columns)
                    if not isinstance(score, Scored):
                        return replace(score, reason=f"{name}: {score.reason}")
                    total += member.weight * score.value
                    metrics |= {f"{name}/{key}": value for key, value in score.metrics.items()}
                    metrics[name] = score.value
        except TimeoutError:
            reason = f"{name}: the sum took longer than `reward.timeout_s` ({self._timeout_s:g} s)"
            if in_thread:
                raise DeadlineExceeded(reason) from None
            return Failed(reason)
        return to_score("the sum of the members", {"reward": total, **metrics})
