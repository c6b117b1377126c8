"""Calls the members of a sum of rewards, and adds their values."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from millrace.config.tables import task as table
from millrace.core.errors import ConfigError, DeadlineExceeded, RewardError, SandboxError
from millrace.core.types import Abstain, Failed, Score, Scored
from millrace.environments.calls import Calls
from millrace.environments.rewards import make_reward
from millrace.environments.rows import Row
from millrace.environments.scores import to_score
from millrace.environments.tasks import Task
from millrace.environments.verifiers.retries import RetriedCalls

_log = logging.getLogger(__name__)


def make_calls(config: table.Reward, task: Task, run_dir: Path | None) -> Calls | RetriedCalls | SumCalls:
    """What calls the reward of a configuration, or each member of a sum.

    Raises: ConfigError, RewardError: a reward does not fit the task; of a sum, the error names the member.
    """
    workers = config.most_workers
    if not isinstance(config, table.SumRewardSection):
        return _one_calls(config, task, run_dir, workers)
    members = []
    for member in config.members:
        try:
            limited = member.reward.model_copy(update={"timeout_s": config.timeout_s})
            members.append((member, _one_calls(limited, task, run_dir, workers)))
        except (ConfigError, RewardError, SandboxError) as error:
            raise type(error)(f"`reward.members` ({member.name}): {error}") from error
    return SumCalls(members, config.timeout_s)


def _one_calls(
    config: table.OneReward, task: Task, run_dir: Path | None, workers: int
) -> Calls | RetriedCalls:
    calls = Calls(make_reward(config, task, run_dir=run_dir, workers=workers), config.timeout_s)
    if isinstance(config, table.FunctionRewardSection) and config.attempts > 1:
        return RetriedCalls(calls, config.timeout_s, config.attempts, config.backoff_s)
    return calls


class SumCalls:
    """The weighted sum of rewards. Each member's value is a metric by its name, and its metrics are
    NAME/METRIC.

    The first member that fails or abstains decides: the rest is not called. A member that may be left out
    adds nothing instead, and NAME/abstained and NAME/failed are its shares. If all are left out, the first
    that failed decides, else the first. Plain members come before async ones, so that the calls of a batch
    take turns in the order of the batch. If a plain member is over the deadline, its thread may never end.

    Source: TRL leaves out a function that returns None in the same way, with no other weight for the others.
    """

    def __init__(
        self, members: Sequence[tuple[table.RewardMember, Calls | RetriedCalls]], timeout_s: float
    ) -> None:
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
