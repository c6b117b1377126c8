"""The environment role: prompts for group ids, and scores for completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from millrace.config import schema
from millrace.core.errors import DataError
from millrace.core.types import BadPrompt, Failed, Prompt, Score, ScoreRequest
from millrace.environments.calls import Calls
from millrace.environments.limits import limit_process_memory
from millrace.environments.order import row_of
from millrace.environments.rewards import make_reward
from millrace.environments.rows import Row
from millrace.environments.tasks import make_task
from millrace.environments.tokenizer import load_tokenizer

T = TypeVar("T")


class EnvironmentWorker:
    """Role `millrace.environments.worker:EnvironmentWorker` (a core.protocols.Environment).

    It keeps no state: every answer is a function of the configuration and the request, so any worker
    can serve any group, and one that was killed is replaced by starting another. Rows and tokens are
    made in one thread and plain reward functions called in another, so the loop is always free to answer.

    Args:
        config: a dumped `Config`.
        limit_memory: bound this process's memory by `reward.memory_mb`; False where the process is not
            the worker's own.
    Raises:
        ConfigError, DataError, RewardError: tokenizer, task or reward cannot be had as configured.
    """

    def __init__(self, config: dict[str, Any], limit_memory: bool = True) -> None:
        self._config = schema.Config.model_validate(config)
        reward = self._config.reward
        self._tokenizer = load_tokenizer(self._config.model.path)
        self._task = make_task(self._config.task, self._tokenizer)
        self._calls = Calls(make_reward(reward, self._task), reward.timeout_s)
        self._rows = ThreadPoolExecutor(1, "rows")
        if limit_memory:
            limit_process_memory(reward.memory_mb)

    async def prompts(self, group_ids: list[int]) -> list[Prompt | BadPrompt]:
        """The prompts of these groups, in order; a row that cannot be one comes with the reason."""
        return await self._in_rows(lambda: [self._prompt(group_id) for group_id in group_ids])

    async def score(self, requests: list[ScoreRequest]) -> AsyncIterator[tuple[int, Score]]:
        """(trajectory id, score) in the order of the requests, each as soon as it is known.

        All requests start at once; plain functions then take turns. Closing the iterator cancels
        what has not begun.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._score(request)) for request in requests]
            try:
                for request, task in zip(requests, tasks, strict=True):
                    yield request.trajectory_id, await task
            except GeneratorExit:  # leave the group normally, or it would wrap this in an exception group
                for task in tasks:
                    task.cancel()

    async def _score(self, request: ScoreRequest) -> Score:
        try:
            completion, columns = await self._in_rows(lambda: self._inputs(request))
        except DataError as error:
            return Failed(str(error))
        answer = None if self._task.answer is None else columns[self._task.answer]
        return await self._calls.score(completion, answer, columns)

    def _inputs(self, request: ScoreRequest) -> tuple[str, Row]:
        text = self._tokenizer.decode(
            request.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text, self._task.columns(self._row(request.group_id))

    def _prompt(self, group_id: int) -> Prompt | BadPrompt:
        row = self._row(group_id)
        row_id = self._task.row_id(row)
        try:
            text = self._task.prompt_text(row)
            # A chat template writes its own special tokens.
            tokens = self._tokenizer.encode(text, add_special_tokens=not self._config.task.chat)
            self._check_length(row_id, text, len(tokens))
        except DataError as error:
            return BadPrompt(group_id, row_id, str(error))
        return Prompt(group_id, row_id, tokens, text)

    def _check_length(self, row_id: str, text: str, num_tokens: int) -> None:
        room = self._config.rollout.max_sequence_tokens - self._config.sampling.max_tokens
        if not text.strip() or num_tokens == 0:
            raise DataError(f"{row_id}: the prompt is empty")
        if num_tokens > room:
            raise DataError(
                f"{row_id}: the prompt has {num_tokens} tokens, there is room for {room} "
                "(`rollout.max_sequence_tokens` - `sampling.max_tokens`)"
            )

    def _row(self, group_id: int) -> int:
        return row_of(group_id, self._task.rows, self._config.seed)

    async def _in_rows(self, make: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._rows, make)
