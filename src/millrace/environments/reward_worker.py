"""The reward worker: prompts for group ids, and scores for completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from msgspec.structs import replace

from millrace.config.schema import Config
from millrace.core.completion.columns import token_array
from millrace.core.errors import DataError, OutOfMemory, needing_memory
from millrace.core.types import BadPrompt, Failed, Prompt, Score, Scored, ScoreRequest
from millrace.environments.answers import make_answer
from millrace.environments.calls import Calls
from millrace.environments.limits import limit_process_memory
from millrace.environments.order import row_of
from millrace.environments.rewards import make_reward
from millrace.environments.rows import Row, find_column
from millrace.environments.scores import shortened
from millrace.environments.tasks import make_task
from millrace.environments.tokenizer import encode_prompt, load_tokenizer

T = TypeVar("T")
_ADVICE = "Raise `reward.memory_mb`, or look for what keeps so much."

Inputs = tuple[str, Row] | Failed | OutOfMemory
"""A completion's text and its row's columns, or the reason why they are missing."""


class TaskRewardWorker:
    """Role `millrace.environments.reward_worker:TaskRewardWorker` (a core.protocols.RewardWorker).

    The worker keeps no state: every answer is a function of the configuration and the request. So any worker
    can serve any group, and a new worker can replace a killed worker. One thread makes rows and tokens, and
    another calls plain reward functions. So the loop can answer unless a function blocks the interpreter.

    Args:
        config: a dumped `Config`.
        limit_memory: bound this process's memory by `reward.memory_mb`; False if others use the process too.
        answers: give with each score the answer of the completion.
    Raises:
        ConfigError, DataError, RewardError: tokenizer, task or reward cannot be made as configured.
    """

    def __init__(self, config: dict[str, Any], limit_memory: bool = True, answers: bool = False) -> None:
        self._config = Config.model_validate(config)
        reward = self._config.reward
        self._tokenizer = load_tokenizer(self._config.model.path)
        self._task = make_task(self._config.task, self._tokenizer)
        self._calls = Calls(make_reward(reward, self._task), reward.timeout_s)
        self._answer = make_answer(reward) if answers else None
        self._rows = ThreadPoolExecutor(1, "rows")
        if limit_memory:
            limit_process_memory(reward.memory_mb)

    async def prompts(self, group_ids: list[int]) -> list[Prompt | BadPrompt]:
        """The prompts of these groups, in order; an unusable row comes with the reason.

        Raises: OutOfMemory: this process is at its limit.
        """
        with needing_memory("a reward worker", "prompts", _ADVICE):
            return await self._in_rows(lambda: [self._prompt(group_id) for group_id in group_ids])

    async def row_ids(self, group_ids: list[int]) -> list[str]:
        return [self._task.row_id(self._row(group_id)) for group_id in group_ids]

    async def score(self, requests: list[ScoreRequest]) -> AsyncIterator[tuple[int, Score]]:
        """(trajectory id, score) in the order of the requests, each as soon as it is known.

        Plain functions run one after the other. Each call begins when the score before it was sent. So if a
        call ends this process, or blocks its interpreter, the caller waits for exactly that call. Async
        functions all start at once. Closing the iterator cancels calls that have not begun.

        Raises:
            OutOfMemory: this process is at its limit; another process may compute the next score.
            DeadlineExceeded: the plain function of the next score; its thread is lost, and so this process.
        """
        inputs = await self._in_rows(lambda: [self._inputs(request) for request in requests])
        pairs = list(zip((request.trajectory_id for request in requests), inputs, strict=True))
        if not self._calls.is_async:
            for trajectory_id, one in pairs:
                yield trajectory_id, await self._score(one)
            return
        exhausted = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._attempt(one)) for one in inputs]
            try:
                for (trajectory_id, _), task in zip(pairs, tasks, strict=True):
                    result = await task
                    if isinstance(result, OutOfMemory):
                        exhausted = result
                        break
                    yield trajectory_id, result
            except GeneratorExit:  # leave the group normally: it would wrap the exception
                pass
            for task in tasks:
                task.cancel()
        if exhausted is not None:
            raise exhausted

    async def _attempt(self, inputs: Inputs) -> Score | OutOfMemory:
        """The score. An OutOfMemory is returned, because the task group would wrap an error."""
        try:
            return await self._score(inputs)
        except OutOfMemory as error:
            return error

    async def _score(self, inputs: Inputs) -> Score:
        match inputs:
            case Failed():
                return inputs
            case OutOfMemory():
                raise inputs
            case completion, columns:
                answer = None if self._task.answer is None else find_column(columns, self._task.answer)
                score = await self._calls.score(completion, answer, columns)
                return await self._with_answer(score, completion)

    async def _with_answer(self, score: Score, completion: str) -> Score:
        find = self._answer
        if find is None or not isinstance(score, Scored):
            return score
        return replace(score, answer=await self._in_rows(lambda: find(completion)))

    def _inputs(self, request: ScoreRequest) -> Inputs:
        try:
            with needing_memory("a reward worker", "a completion and its row", _ADVICE):
                text = self._tokenizer.decode(
                    list(request.tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                return text, self._task.columns(self._row(request.group_id))
        except DataError as error:
            return Failed(str(error))
        except OutOfMemory as error:
            return error

    def _prompt(self, group_id: int) -> Prompt | BadPrompt:
        row = self._row(group_id)
        row_id = self._task.row_id(row)
        try:
            text = self._task.prompt_text(row)
            self._check_characters(row_id, text)
            _check_surrogates(row_id, text)
            if self._task.is_chat(row):  # a chat template writes its own special tokens
                tokens = self._tokenizer.encode(text, add_special_tokens=False)
            else:
                tokens = encode_prompt(self._tokenizer, text)
            self._check_length(row_id, text, len(tokens))
        except DataError as error:
            return BadPrompt(group_id, row_id, str(error))
        except MemoryError:
            raise
        except Exception as error:  # a row, a template or a tokenizer may raise anything
            return BadPrompt(group_id, row_id, f"{row_id}: {type(error).__name__}: {shortened(error)}")
        return Prompt(group_id, row_id, token_array(tokens), text)

    @property
    def _room(self) -> int:
        """The most tokens of a prompt."""
        return self._config.rollout.max_sequence_tokens - self._config.sampling.max_tokens

    @cached_property
    def _characters_per_token(self) -> int:
        """The most characters of a token in the vocabulary. A normalizer that drops characters allows
        more."""
        return max(len(token) for token in self._tokenizer.get_vocab())

    def _check_characters(self, row_id: str, text: str) -> None:
        """Refuse a long text before tokenization, which takes seconds for some megabytes."""
        if len(text) > self._room and len(text) > self._room * self._characters_per_token:
            raise DataError(
                f"{row_id}: the prompt has {len(text):,} characters, more than {self._room} tokens can hold "
                "(`rollout.max_sequence_tokens` - `sampling.max_tokens`)"
            )

    def _check_length(self, row_id: str, text: str, num_tokens: int) -> None:
        room = self._room
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


def _check_surrogates(row_id: str, text: str) -> None:
    """Refuse half of a surrogate pair. JSON can contain it, and no tokenizer can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row_id}: character {error.start} of the prompt is half a character "
            f"({text[error.start]!a}): write both halves of the pair, or leave it out"
        ) from None
