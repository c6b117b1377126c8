"""The task and the reward of a run, tried before the run: one prompt, and one call of the reward.

It happens as in the run: in a process of its own, under the reward's deadline and memory limit. So a reward
that hangs, ends its process or needs too much memory is found too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from millrace.config.schema import Config
from millrace.core.columns import token_array
from millrace.core.errors import RewardError
from millrace.core.protocols import Handle
from millrace.core.types import Failed, Finish, Score, ScoreRequest
from millrace.environments.first_look import TaskSeen, TriedCompletion
from millrace.runtime.local import LocalRuntime
from millrace.session.scores import Timed, drain, start_worker

TARGET = "millrace.environments.first_look:FirstLook"
REASONS_SHOWN = 3


@dataclass(frozen=True)
class FirstTry:
    """`tried` are the calls of the reward, up to the first that did not fail."""

    seen: TaskSeen
    tried: list[tuple[TriedCompletion, Timed]]


def try_first(config: Config) -> FirstTry:
    """Raises: ConfigError, DataError, RewardError: the run could not have a prompt, or a reward."""
    return asyncio.run(_try_first(config))


def warnings(config: Config, first: FirstTry) -> Iterator[str]:
    """What would spoil the run and does not end it, one sentence each."""
    seen, prompts = first.seen, config.batch.prompts
    if seen.num_unusable:
        yield (
            f"{seen.num_unusable} of the first {seen.num_probed} rows cannot be used and are skipped; the "
            f"first: {seen.why}"
        )
    if prompts > seen.rows:
        yield (
            f"a step takes `batch.prompts` ({prompts}) prompts, and the task has {seen.rows} rows: each row "
            f"comes {prompts / seen.rows:.3g} times in a step"
        )
    attempt, timed = first.tried[0]
    if isinstance(timed.score, Failed):
        yield f"{attempt.row_id}: the reward fails on {attempt.kind}: {timed.score.reason}"


async def _try_first(config: Config) -> FirstTry:
    runtime = LocalRuntime()
    try:
        worker = await start_worker(runtime, config, TARGET)
        seen = await worker.call("look", timeout_s=config.supervision.spawn_timeout_s)
        return FirstTry(seen, await _try_reward(worker, config, seen))
    finally:
        await runtime.close()


async def _try_reward(worker: Handle, config: Config, seen: TaskSeen) -> list[tuple[TriedCompletion, Timed]]:
    """Raises: RewardError: every call fails, or one costs the worker before another has succeeded."""
    tried: list[tuple[TriedCompletion, Timed]] = []
    for attempt in seen.attempts:
        request = ScoreRequest(0, attempt.group_id, token_array(attempt.tokens), Finish.STOP)
        scored: list[Timed] = []
        lost = await drain(worker, config.reward.timeout_s, [request], scored)
        tried.append((attempt, scored[0]))
        if not isinstance(scored[0].score, Failed):
            return tried
        if lost:
            break
    told = dict.fromkeys(f"  {attempt.kind}: {_reason(timed.score)}" for attempt, timed in tried)
    raise RewardError(
        f"the reward fails at every call, beginning with the row {tried[0][0].row_id}:\n"
        + "\n".join(list(told)[:REASONS_SHOWN])
        + "\n  Correct it: `millrace try-reward` calls it alone"
    )


def _reason(score: Score) -> str:
    return score.reason if isinstance(score, Failed) else ""
